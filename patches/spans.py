"""Spans of attention calls for `torch.profiler`: what was chosen for which layer, around the operations that it ran.

    with torch.profiler.profile() as seen, spans():
        model(**inputs)
    seen.export_chrome_trace("trace.json")

They are opened by a recorder, so that nothing is asked of a call outside the block. Inside it every call takes the long
way, whose microseconds in Python are not those of small calls outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.request import AttentionRequest, CallSpec
from adaattn_hf.attention.tap import Recorder, recording
from adaattn_hf.backends.select import choose

__all__ = ["spans"]


class _Spans(Recorder):
    """One span per attention call, open from the choice of its backend to its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.open: Any = None

    def close(self) -> None:
        """Ends the span of a call that has been answered, or has failed."""
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    def record(self, module: nn.Module, spec: CallSpec, forced: str | None) -> None:
        """Begins a call's span."""
        self.close()
        layer, name = getattr(module, "layer_idx", None), choose(spec, forced).name
        planned = " plan" if getattr(getattr(module, "config", None), "adaattn", None) else ""
        self.open = torch.profiler.record_function(f"adaattn layer {layer}: {name} {spec.kind}{planned}")
        self.open.__enter__()

    def answered(self, module: nn.Module, request: AttentionRequest, forced: str | None, out: Tensor) -> None:
        """Ends it."""
        self.close()


@contextmanager
def spans() -> Iterator[None]:
    """Every attention call of this thread inside the block is a span named by layer, backend and kind of call."""
    recorder = _Spans()
    with recording(recorder):
        try:
            yield
        finally:
            recorder.close()
