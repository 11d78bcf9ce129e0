"""`auto` by a measured table beside every installed kernel: `python tests/gpu/tuned.py --write docs/results`.

The table is made call by call, as ADAATTN_TUNE=first makes it, in a directory of its own. Then `auto`, every backend
that serves the call and torch's kernels by name are timed in turn, so that the clock of a warm device strikes all
alike: the longer one of the device's time (nothing in the L2 cache) and the host's, median of eleven. A second run goes
on where one was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn_hf.attention.request import AttentionRequest, AttentionResult
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.base import spec_of
from adaattn_hf.backends.clocks import clock_of, quartiles
from adaattn_hf.backends.table import MARGIN

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.gpu.pages import request, setting, stock

Call = Callable[[], Any]
ENOUGH = 0.97


def requests() -> dict[str, AttentionRequest]:
    """The exact calls of the page of plans: dense, masks, steps, training."""
    n, long = 4096, 16384
    left = torch.ones(8, n, dtype=torch.bool)
    for i in range(8):
        left[i, : n * i // 8] = False
    documents = torch.repeat_interleave(torch.arange(16), 1024)[None].cuda()
    used = torch.tensor(4095, device="cuda")
    structures = {
        "left-padded 8 × 4k": CallStructure(8, n, n, causal=True, key_padding=left.cuda(), pads_queries=True),
        "packed 16 × 1k": CallStructure(
            1, long, long, causal=True, q_segments=documents, k_segments=documents
        ),
        "window 1k at 16k": CallStructure(1, long, long, causal=True, window=1024),
        "512 queries behind 7.5k": CallStructure(4, 512, 8192, causal=True, q_offset=7680),
        "static cache, 4k of 16k in use": CallStructure(8, 1, long, causal=True, q_offset=used),
    }
    for batch, length in ((1, 4096), (1, 32768), (8, 32768), (1, 131072)):
        steps = CallStructure(batch, 1, length, causal=True, q_offset=length - 1)
        structures[f"step, {batch} × {length // 1024}k"] = steps
    found = {name: request(structure) for name, structure in structures.items()}
    shapes = [(1, 512, 32, 8, 128), (1, 2048, 32, 8, 128), (1, long, 16, 16, 128), (4, n, 32, 8, 128)]
    for batch, length, heads, kv_heads, dim in (*shapes, (2, 8192, 32, 32, 64), (1, 32768, 32, 8, 128)):
        structure = CallStructure(batch, length, length, causal=True)
        name = f"causal, {batch} × {length}, {heads}/{kv_heads} × {dim}"
        found[name] = request(structure, heads=heads, kv_heads=kv_heads, dim=dim)
    for name in ("window 1k at 16k", "packed 16 × 1k"):
        found[f"{name}, both passes"] = request(structures[name], grad=True)
    found["causal 16k, both passes"] = request(CallStructure(1, long, long, causal=True), grad=True)
    return found


def ways(asked: AttentionRequest) -> dict[str, Call]:
    """The call through `auto`, through every backend that serves it, and through torch's kernels where they can."""
    spec, inputs = spec_of(asked), (asked.query, asked.key, asked.value)

    def both(attend: Callable[[AttentionRequest], AttentionResult]) -> Call:
        if not asked.query.requires_grad:
            return lambda: attend(asked)
        grad = torch.ones_like(attend(asked).out)
        return lambda: torch.autograd.grad(attend(asked).out, inputs, grad)

    names = [name for name in select.BACKENDS if name != "eager" and not select.refusals_of(name, spec)]
    found = {"auto": both(select.attend), **{name: both(select.BACKENDS[name].attend) for name in names}}
    if spec.kind in ("causal", "suffix") and (spec.decode or spec.kind == "causal") and not spec.needs_grad:
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            found[f"torch {kernel.name.split('_')[0].lower()}"] = under(kernel, stock(asked))
    return found


def under(kernel: SDPBackend, call: Call) -> Call:
    """A call of torch's operator by one of its kernels."""

    def run() -> Any:
        with sdpa_kernel(kernel):
            return call()

    return run


def measure(name: str, asked: AttentionRequest) -> dict[str, Any]:
    """One cell: what was taken before and by the table, and the median microseconds of all ways."""
    started, spec = time.perf_counter(), spec_of(asked)
    first = next(one for one in select.order(spec) if not select.refusals_of(one, spec))
    taken = select.choose(spec).name
    calls = ways(asked)
    for call in calls.values():
        call()
    times = {way: quartiles(runs) for way, runs in clock_of("cuda")(calls).items()}
    best = min(middle for way, (_, middle, _) in times.items() if way != "auto")
    row = {"cell": name, "order": first, "table": taken, "share": best / times["auto"][1], "times": times}
    print(f"{name}: {first} → {taken}, {row['share']:.3f} of the best, {time.perf_counter() - started:.0f} s")
    return row


def page(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in report["setting"].items())
    ways = list(dict.fromkeys(way for row in report["cells"] for way in row["times"]))
    lines = [
        "# `auto` by a measured table on a CUDA device",
        "",
        f"Written by `tests/gpu/tuned.py`. {facts}. bfloat16, 32/8 heads of 128 unless said. Median microseconds; "
        f"`share` is the best other time over that of `auto`, to reach {ENOUGH}. The table leaves the built-in order "
        f"from {MARGIN} times as fast on, where the quartiles stand apart.",
        "",
        "| call | order | table | share | " + " | ".join(ways) + " |",
        "|---|---|---|---:|" + "---:|" * len(ways),
    ]
    for row in report["cells"]:
        share = f"{row['share']:.2f}" + ("" if row["share"] >= ENOUGH else " **not reached**")
        shown = (f"{row['times'][way][1]:.0f}" if way in row["times"] else "–" for way in ways)
        lines.append(f"| {row['cell']} | {row['order']} | {row['table']} | {share} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="directory for gpu_tuned.json and gpu_tuned.md")
    where: Path | None = parser.parse_args().write
    result: dict[str, Any] = {"setting": setting(), "cells": []}
    if where is not None and (where / "gpu_tuned.json").exists():
        before = json.loads((where / "gpu_tuned.json").read_text(encoding="utf-8"))
        result = before if before["setting"] == result["setting"] else result
    done = {row["cell"] for row in result["cells"]}
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"ADAATTN_TUNE": "first", "XDG_CACHE_HOME": cache}
        for name, asked in requests().items():
            if name in done:
                continue
            result["cells"].append(measure(name, asked))
            if where is not None:
                (where / "gpu_tuned.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                (where / "gpu_tuned.md").write_text(page(result), encoding="utf-8")
