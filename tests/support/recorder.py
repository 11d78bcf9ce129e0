"""A listener that notes which calls a model makes."""

from torch import nn

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import CallKind
from adaattn_hf.attention.listeners import Listener
from adaattn_hf.attention.structure import MaskStructure


class Recorder(Listener):
    """Collects calls: the module, the kind of call and the backend that was asked for by name; and their structures."""

    def __init__(self) -> None:
        super().__init__(before=self.note)
        self.calls: list[tuple[nn.Module, CallKind, str | None]] = []
        self.structures: list[MaskStructure] = []

    def note(self, module: nn.Module, call: AttentionCall) -> None:
        """Note a call."""
        self.calls.append((module, call.checked_kind(), call.backend))
        self.structures.append(call.structure)
