"""A tap: while one is open, every attention call of this thread is answered by it.

Calibration and monitoring listen here. The attention function hands over the module and the request, and
returns what the tap returns; nothing of a model is patched and nothing stays behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from adaattn_hf.request import AttentionRequest

Tap = Callable[[nn.Module, AttentionRequest], Tensor]
"""Maps a module and its request to the output `[batch, q_len, heads, head_dim_v]`."""

_active: ContextVar[Tap | None] = ContextVar("adaattn_tap", default=None)
active_tap = _active.get


@contextmanager
def tapping(tap: Tap | None) -> Iterator[None]:
    """Lets a tap answer the calls of this thread; `None` closes an outer one for a while."""
    token = _active.set(tap)
    try:
        yield
    finally:
        _active.reset(token)
