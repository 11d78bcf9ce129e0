"""Notes the attention calls of a model by kind, before they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from adaattn_hf.attention.kind import CallSpec
from adaattn_hf.attention.listeners import Listener
from adaattn_hf.attention.request import AttentionRequest, head_dim_of


@dataclass(eq=False)
class Recorder(Listener):
    """Collects calls: the module, the kind of call and the backend that was asked for by name.

    A `dry` one answers them by uninitialised tensors of the right shape (for the meta device).
    """

    dry: bool = False
    calls: list[tuple[nn.Module, CallSpec, str | None]] = field(default_factory=list)

    def before(self, module: nn.Module, call: AttentionRequest) -> None:
        """Note a call."""
        self.calls.append((module, call.checked_kind(), call.backend))

    def answer(self, module: nn.Module, call: AttentionRequest) -> Tensor | None:
        """Return a tensor without an output in it, if nothing is to be computed."""
        batch, heads, q_len, _ = call.query.shape
        return call.query.new_empty((batch, q_len, heads, head_dim_of(call.value))) if self.dry else None
