"""`auto` by a measured table beside every installed kernel, in the exact calls of the other sections.

The table is made call by call, as ADAATTN_TUNE=first makes it, in a directory of its own. Then `auto`, every backend
that serves the call and torch's kernels by name are timed in turn, so that the clock of a warm device strikes all
alike: the longer one of the device's time (nothing in the L2 cache) and the host's, median of eleven. `auto` and the
backends are called as layers do that follow the first one of a pass, which has chosen.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.base import layer_call, spec_of
from adaattn_hf.backends.clocks import clock_of, quartiles
from adaattn_hf.patches.tuned import forget

from .kernels import masks
from .measure import DEVICE, ON_CUDA, Cell, Section, length, request, stock

Call = Callable[[], Any]


def tuned(section: Section) -> None:
    """Every call once with a table of its own."""
    with table_aside():
        for name, make in calls().items():

            def cell(row: Cell, make: Callable[[], AttentionRequest] = make) -> None:
                asked = make()
                spec = spec_of(asked)
                first = next(name for name in select.order(spec) if not select.refusals_of(name, spec))
                row["auto takes"] = select.choose(spec).name  # measures
                row["built-in order"] = first
                times = medians(ways(asked))
                best = min(time for way, time in times.items() if way != "auto")
                row |= {"share of the best ×": best / times["auto"], **times}

            section.add(name, cell)


def medians(found: Mapping[str, Call]) -> dict[str, float]:
    """Microseconds of calls that are taken in turn, once the clock has had each compiled."""
    return {way: quartiles(runs)[1] for way, runs in clock_of(DEVICE.type)(found).items()}


@contextmanager
def table_aside() -> Iterator[None]:
    """Measure at the first call of each class, into a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        with mock.patch.dict(os.environ, {"ADAATTN_TUNE": "first", "XDG_CACHE_HOME": cache}):
            forget()
            yield
        forget()


def calls() -> dict[str, Callable[[], AttentionRequest]]:
    """What makes each call: dense, masks, steps, both passes."""
    long = length(16384)
    made = masks() | {"causal 16k": CallStructure(1, long, long, causal=True)}
    found = {name: _asked(structure) for name, structure in made.items()}
    for batch, keys in ((1, 4096), (1, 32768), (8, 32768), (1, 131072)):
        step = CallStructure(batch, 1, length(keys), causal=True, q_offset=length(keys) - 1)
        found[f"step, {batch} × {keys // 1024}k"] = _asked(step)
    shapes = ((1, 512, 32, 8, 128), (1, 2048, 32, 8, 128), (1, 16384, 16, 16, 128), (4, 4096, 32, 8, 128))
    for batch, keys, heads, kv_heads, dim in (*shapes, (2, 8192, 32, 32, 64), (1, 32768, 32, 8, 128)):
        structure = CallStructure(batch, length(keys), length(keys), causal=True)
        name = f"causal, {batch} × {keys}, {heads}/{kv_heads} × {dim}"
        found[name] = _asked(structure, heads=heads, kv_heads=kv_heads, dim=dim)
    for name in ("window 1k at 16k", "packed 16 × 1k", "causal 16k"):
        found[f"{name}, both passes"] = _asked(made[name], grad=True)
    return found


def _asked(structure: CallStructure, **shape: Any) -> Callable[[], AttentionRequest]:
    return lambda: request(structure, **shape)


def ways(asked: AttentionRequest) -> dict[str, Call]:
    """The call through `auto`, through every backend that serves it, and through torch's kernels where they can."""
    spec = spec_of(asked)
    names = [name for name in select.BACKENDS if name != "eager" and not select.refusals_of(name, spec)]

    found = {"auto": layer_call(select.choose(spec), asked)}
    found |= {name: layer_call(select.BACKENDS[name], asked) for name in names}
    plain = spec.kind == "causal" or (spec.kind == "suffix" and spec.decode)
    if ON_CUDA and plain and not spec.needs_grad:
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            found[f"torch {kernel.name.split('_')[0].lower()}"] = _under(kernel, stock(asked))
    return found


def _under(kernel: SDPBackend, call: Call) -> Call:
    """A call of torch's operator by one of its kernels."""

    def run() -> Any:
        with sdpa_kernel(kernel):
            return call()

    return run
