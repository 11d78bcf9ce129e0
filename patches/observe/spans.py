"""Labels attention calls in `torch.profiler` traces with their layer, backend and kind of call.

    with torch.profiler.profile() as seen, spans():
        model(**inputs)
    seen.export_chrome_trace("trace.json")

A recorder opens the spans, so calls outside the block cost nothing more. Inside it no call takes the fast path, so that
small calls spend more time in Python there than they do otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.kind import CallSpec
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.tap import Recorder, recording
from adaattn_hf.backends.select import choose


class _Spans(Recorder):
    """Opens a span when a call's backend is chosen, and closes it when the call returns."""

    def __init__(self) -> None:
        super().__init__()
        self.open: Any = None

    def close(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    def record(self, module: nn.Module, spec: CallSpec, forced: str | None) -> None:
        self.close()
        layer, name = getattr(module, "layer_idx", None), choose(spec, forced).name
        planned = " plan" if getattr(getattr(module, "config", None), "adaattn", None) else ""
        self.open = torch.profiler.record_function(f"adaattn layer {layer}: {name} {spec.shape}{planned}")
        self.open.__enter__()

    def answered(self, module: nn.Module, request: AttentionRequest, forced: str | None, out: Tensor) -> None:
        self.close()


@contextmanager
def spans() -> Iterator[None]:
    """Gives every attention call of this thread a profiler span named by layer, backend and kind of call."""
    recorder = _Spans()
    with recording(recorder):
        try:
            yield
        finally:
            recorder.close()
