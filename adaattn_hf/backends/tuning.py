"""Measures the exact backends against one another on random tensors of a class of calls.

Each class is tried at both ends. A call is made as a layer makes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..attention.request import AttentionRequest
from .base import bound, spec_of
from .clocks import Clock, clock_of, quartiles
from .probes import probes
from .select import BACKENDS, refusals_of
from .table import Cell, Times

FAILURES = (RuntimeError, ValueError, TypeError, ImportError, AssertionError)
"""What a kernel ends in that a device or a version cannot run, or that cannot be compiled."""


def measure(device: str, cell: Cell, clock: Clock | None = None) -> Times:
    """Times of every backend that serves all probes of a class; empty where fewer than two do."""
    clock = clock or clock_of(device)
    found: dict[str, list[tuple[float, float, float]]] = {}
    made = 0
    # whoever calls may be in the middle of a forward pass
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(cell.gradient),
        torch.autocast(device, enabled=False),
    ):
        try:
            for request in probes(device, cell):
                made += 1
                calls = _calls(request)
                if len(calls) < 2:
                    return {}
                for name, runs in clock(calls).items():
                    found.setdefault(name, []).append(quartiles(runs))
        except torch.OutOfMemoryError as error:
            what = f"{cell.kind}, {cell.dtype}, head_dim {cell.head_dim}, up to {cell.length} keys"
            warnings.warn(f"adaattn: not measured, there is no room: {what}: {error}", stacklevel=2)
            return {}
    whole = {name: spreads for name, spreads in found.items() if len(spreads) == made}
    return whole if len(whole) > 1 else {}


def _calls(request: AttentionRequest) -> dict[str, Callable[[], Any]]:
    """The request through each backend that serves it exactly, but the one whose score matrix fills the memory."""
    spec, calls = spec_of(request), {}
    for name in BACKENDS:
        if name == "eager" or refusals_of(name, spec):
            continue
        try:
            call = bound(BACKENDS[name], request)
            call()  # compiles what is compiled at the first call
        except FAILURES as error:
            warnings.warn(f"adaattn: {name} fails at {spec.words()}: {error}", stacklevel=2)
            continue
        calls[name] = call
    return calls
