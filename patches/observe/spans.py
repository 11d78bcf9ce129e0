"""Labels attention calls in `torch.profiler` traces with their layer, backend and kind of call.

    with torch.profiler.profile() as seen, spans():
        model(**inputs)
    seen.export_chrome_trace("trace.json")

A listener opens the spans, so calls outside the block cost nothing more. Inside it no call takes the fast path, so that
small calls spend more time in Python there than they do otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.listeners import Listener, listening
from adaattn_hf.backends.select import choose

from ..plans.slots import layer_of


class _Spans(Listener):
    """Opens a span when a call's backend is chosen, and closes it when the call returns."""

    open: Any = None

    def before(self, module: nn.Module, call: AttentionCall) -> None:
        self.close()  # that of a call which failed
        kind, layer = call.checked_kind(), getattr(module, "layer_idx", None)
        planned = "" if layer_of(module) is None else " plan"
        name = f"adaattn layer {layer}: {choose(kind, call.backend).name} {kind.shape}{planned}"
        self.open = torch.profiler.record_function(name)
        self.open.__enter__()

    def after(self, module: nn.Module, call: AttentionCall, out: Tensor) -> None:
        self.close()

    def close(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None


@contextmanager
def spans() -> Iterator[None]:
    """Gives every attention call of this thread a profiler span named by layer, backend and kind of call."""
    with listening(_Spans()) as listener:
        try:
            yield
        finally:
            listener.close()
