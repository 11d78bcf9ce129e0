"""What a backend is: who computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from ..request import AttentionRequest, AttentionResult, CallSpec
from ..structure import CallStructure

__all__ = ["Backend", "BareCall"]

BareCall = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Maps query, key, value and scaling to the output `[batch, q_len, heads, head_dim_v]`."""


class Backend(Protocol):
    """Computes attention for the requests that it does not refuse.

    A backend never calls another one and never falls back.

    Attributes:
        name: Name in `adaattn_<name>`, in logs and in reports.
    """

    name: str

    def missing(self) -> tuple[str, ...]:
        """All that this installation lacks for the backend to run at all; empty if nothing. Imports lazily."""
        ...

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """All the reasons why a call of this kind cannot be served; empty if it can."""
        ...

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Compute attention. Called only with requests whose spec is not refused."""
        ...

    def bare(self, spec: CallSpec, structure: CallStructure) -> BareCall | None:
        """The shortest way to what `attend` computes for a structure and tensors of a spec, None if there is none.

        Asked once per structure for calls outside of traced graphs that have no dropout, bias, softcap or learned
        sinks and need no log-sum-exp: in small models what stands around the kernel costs as much as the kernel.
        """
        return None
