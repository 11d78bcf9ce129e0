"""What a backend is: who computes."""

from __future__ import annotations

from typing import Protocol

from ..request import AttentionRequest, AttentionResult, CallSpec

__all__ = ["Backend"]


class Backend(Protocol):
    """Computes attention for the requests that it does not refuse.

    A backend never calls another one and never falls back.
    """

    @property
    def name(self) -> str:
        """Name in `adaattn_<name>`, in logs and in reports."""
        ...

    def missing(self) -> tuple[str, ...]:
        """All that this installation lacks for the backend to run at all; empty if nothing. Imports lazily."""
        ...

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """All the reasons why a call of this kind cannot be served; empty if it can."""
        ...

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Compute attention. Called only with requests whose spec is not refused."""
        ...
