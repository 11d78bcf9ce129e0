"""Labels attention calls in `torch.profiler` traces with their layer, backend and kind of call.

    with torch.profiler.profile() as seen, spans():
        model(**inputs)
    seen.export_chrome_trace("trace.json")

A listener opens the spans, so calls outside the block cost nothing more. Inside it no call takes the fast path, so that
small calls spend more time in Python there than they do otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.listeners import Listener, listening
from adaattn_hf.backends.select import choose

from ..plans.slots import layer_of


@contextmanager
def spans() -> Iterator[None]:
    """Gives every attention call of this thread a profiler span named by layer, backend and kind of call."""
    under_way: list[Any] = []  # the span of the call that is computed, if one is

    def close(*_: Any) -> None:
        while under_way:
            under_way.pop().__exit__(None, None, None)

    def open_one(module: nn.Module, call: AttentionCall) -> None:
        close()  # that of a call which failed
        kind, layer = call.checked_kind(), getattr(module, "layer_idx", None)
        planned = "" if layer_of(module) is None else " plan"
        name = f"adaattn layer {layer}: {choose(kind, call.backend).name} {kind.shape}{planned}"
        under_way.append(torch.profiler.record_function(name))
        under_way[0].__enter__()

    with listening(Listener(before=open_one, after=close)):
        try:
            yield
        finally:
            close()
