"""Listening to attention calls, for `explain` and the statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn

from adaattn_hf.request import CallSpec

__all__ = ["Recorder", "active_recorder", "recording"]


@dataclass
class Recorder:
    """Collects the calls of a forward pass.

    Attributes:
        dry: Nothing is computed; calls return uninitialised tensors of the right shape (for the meta device).
        calls: Per call the module, the spec and the backend that was asked for by name.
    """

    dry: bool = False
    calls: list[tuple[nn.Module, CallSpec, str | None]] = field(default_factory=list)

    def record(self, module: nn.Module, spec: CallSpec, forced: str | None) -> None:
        """Note one call."""
        self.calls.append((module, spec, forced))


_active: ContextVar[Recorder | None] = ContextVar("adaattn_recorder", default=None)
active_recorder = _active.get


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Let a recorder listen to the calls of this thread."""
    token = _active.set(recorder)
    try:
        yield recorder
    finally:
        _active.reset(token)
