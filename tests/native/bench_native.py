# ruff: noqa: E501
"""Times the native kernels against torch's own, interleaved in one process, and writes the table.

`python tests/native/bench_native.py [--seconds S] [--write docs/results [--name NAME]]`. Ratios are of process time with one thread
(cores are shared with other programs, wall time is printed beside it), of wall time with two. Median over rounds with
the quartiles; of the shortest times with two threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.rounding import quantise
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.native import call
from adaattn_hf.backends.native.autograd import Differentiable
from adaattn_hf.backends.native.library import library, missing
from adaattn_hf.backends.native.rules import Rules
from adaattn_hf.backends.select import BACKENDS


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    name: str
    dtype: str
    threads: int
    target: float | None
    flops: float
    native_ms: float
    native_wall_ms: float
    stock_ms: float
    stock_wall_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    gflops: float


Pair = tuple[Callable[[], object], Callable[[], object]]


def compare(name: str, dtype: str, target: float | None, flops: float, pair: Pair, seconds: float) -> Cell:
    """Runs both in turn until the time is up."""
    rows: list[tuple[float, float, float, float]] = []
    for function in pair:
        function()
    begin = time.perf_counter()
    pair[0]()
    repeat = max(1, int(0.002 / max(time.perf_counter() - begin, 1e-7)))
    begin = time.perf_counter()
    while len(rows) < 5 or (time.perf_counter() - begin < seconds and len(rows) < 200):
        row: list[float] = []
        for function in pair:
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(repeat):
                function()
            row += [(time.process_time() - cpu) / repeat, (time.perf_counter() - wall) / repeat]
        rows.append((row[0], row[1], row[2], row[3]))
    columns = [statistics.median(column) for column in zip(*rows, strict=True)]
    threads = torch.get_num_threads()
    ratios = sorted(r[2] / r[0] if threads == 1 else r[3] / r[1] for r in rows)
    quartiles = statistics.quantiles(ratios, n=4)
    middle = statistics.median(ratios)
    if threads > 1:
        # whatever else the machine does strikes both cores now and then, and whoever is measured at that moment
        columns = [min(column) for column in zip(*rows, strict=True)]
        middle = columns[3] / columns[1]
    cell = Cell(
        name, dtype, threads, target, flops,
        *(1e3 * c for c in columns), middle, quartiles[0], quartiles[2],
        flops / columns[0 if threads == 1 else 1] / 1e9,
    )  # fmt: skip
    print(
        f"{cell.dtype:9} {cell.threads} {cell.name:44} {cell.native_ms:9.3f} ms  {cell.ratio:6.2f}x",
        flush=True,
    )
    return cell


def prefill(dtype: torch.dtype, n: int, d: int, causal: bool, compute: str = "model", heads: int = 2) -> Pair:
    q, k, v = (torch.randn(1, heads, n, d).to(dtype) for _ in range(3))
    rules = Rules(causal=causal, compute=compute)
    return (
        lambda: call.forward(q, k, v, d**-0.5, rules),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
    )


def decode(dtype: torch.dtype, heads: int, kv_heads: int, n: int, d: int, int8: bool = False) -> Pair:
    q = torch.randn(1, heads, 1, d).to(dtype)
    k, v = torch.randn(1, kv_heads, n, d), torch.randn(1, kv_heads, n, d)
    stock_k, stock_v = k.to(dtype), v.to(dtype)
    ours, rules = (stock_k, stock_v), Rules()
    if int8:
        (k8, ks), (v8, vs) = quantise(k), quantise(v)
        ours, rules = (k8, v8), Rules(key_scale=ks[..., 0], value_scale=vs[..., 0])
    return (
        lambda: call.forward(q, *ours, d**-0.5, rules),
        lambda: F.scaled_dot_product_attention(q, stock_k, stock_v, enable_gqa=heads != kv_heads),
    )


def training(dtype: torch.dtype, heads: int, n: int, d: int) -> Pair:
    q, k, v = (torch.randn(1, heads, n, d).to(dtype).requires_grad_() for _ in range(3))
    grad, rules = torch.randn(1, n, heads, d).to(dtype), Rules(causal=True)

    def ours() -> object:
        out = Differentiable.apply(q, k, v, None, None, d**-0.5, rules)[0]
        return torch.autograd.grad(out, (q, k, v), grad)

    def stock() -> object:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), grad.transpose(1, 2))

    return ours, stock


def windowed(dtype: torch.dtype, n: int, d: int, window: int) -> Pair:
    q, k, v = (torch.randn(1, 2, n, d).to(dtype) for _ in range(3))
    rules = Rules(causal=True, window=window)
    return (
        lambda: call.forward(q, k, v, d**-0.5, rules),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def packed(dtype: torch.dtype, documents: int, n: int, d: int) -> Pair:
    """Against the best that torch offers: one causal call per document."""
    q, k, v = (torch.randn(1, 2, documents * n, d).to(dtype) for _ in range(3))
    table = torch.tensor([[0, i * n, n, i * n, n, 0] for i in range(documents)])
    rules = Rules(causal=True, segments=table)
    spans = [slice(i * n, (i + 1) * n) for i in range(documents)]
    return (
        lambda: call.forward(q, k, v, d**-0.5, rules),
        lambda: torch.cat(
            [
                F.scaled_dot_product_attention(q[:, :, s], k[:, :, s], v[:, :, s], is_causal=True)
                for s in spans
            ],
            2,
        ),
    )


GRID: dict[str, CallStructure] = {}


def _grid() -> None:
    """The structures on which the kernels are compared with the torch-only backend."""
    n = 1024
    for share in (0.25, 0.5, 0.9):
        lengths = torch.linspace(share * 2 * n - n, n, 4).clamp(n // 16, n).long()
        right = torch.arange(n)[None] < lengths[:, None]
        GRID[f"right padding, {right.float().mean():.0%} real"] = CallStructure(
            4, n, n, causal=True, key_padding=right
        )
        GRID[f"left padding, {right.float().mean():.0%} real"] = CallStructure(
            4, n, n, causal=True, key_padding=right.flip(1)
        )
        GRID[f"encoder padding, {right.float().mean():.0%} real"] = CallStructure(4, n, n, key_padding=right)
    for documents in (2, 8, 32, 128):
        numbers = (torch.arange(4 * n) * documents // (4 * n))[None]
        GRID[f"{documents} documents packed in {4 * n}"] = CallStructure(
            1, 4 * n, 4 * n, causal=True, q_segments=numbers, k_segments=numbers
        )
    for window in (64, 256, 1024):
        GRID[f"window {window} of {4 * n}"] = CallStructure(1, 4 * n, 4 * n, causal=True, window=window)
    GRID[f"window 256 and 4 sinks of {4 * n}"] = CallStructure(
        1, 4 * n, 4 * n, causal=True, window=256, sinks=4
    )


def structured(dtype: torch.dtype, structure: CallStructure, d: int) -> Pair:
    """Against the backend made of torch's operations."""
    q = torch.randn(structure.batch, 4, structure.q_len, d).to(dtype)
    k, v = (torch.randn(structure.batch, 2, structure.kv_len, d).to(dtype) for _ in range(2))
    asked = AttentionRequest(q, k, v, structure, d**-0.5)
    ours, theirs = BACKENDS["native"], BACKENDS["sdpa"]
    return lambda: ours.attend(asked), lambda: theirs.attend(asked)


def peak(dtype: torch.dtype) -> float:
    """GFLOP/s of torch's matrix product (oneDNN), the best of several shapes."""
    best = 0.0
    for m, k in ((1024, 1024), (2048, 1024), (2048, 2048)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, m).to(dtype)
        torch.mm(a, b)
        for _ in range(8):
            begin = time.process_time()
            torch.mm(a, b)
            best = max(best, 2.0 * m * m * k / (time.process_time() - begin) / 1e9)
    return best


def measure(seconds: float) -> list[Cell]:
    """All the cells."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cells: list[Cell] = []

    def add(name: str, dtype: str, target: float | None, flops: float, pair: Pair) -> None:
        cells.append(compare(name, dtype, target, flops, pair, seconds))

    for d in (64, 128):
        square = 4.0 * 2 * 4096 * 4096 * d
        add(f"causal prefill 4096, head {d}", "bf16", 2.6, square / 2, prefill(bf16, 4096, d, True))
        int8 = (prefill(fp32, 4096, d, True, "int8")[0], prefill(bf16, 4096, d, True)[1])
        add(f"causal prefill 4096, head {d}, int8 products", "int8", 3.5, square / 2, int8)
        add(f"causal prefill 4096, head {d}", "fp32", 1.15, square / 2, prefill(fp32, 4096, d, True))
        add(
            f"causal prefill 4096, head {d}, bf16 products",
            "fp32",
            None,
            square / 2,
            prefill(fp32, 4096, d, True, "bf16"),
        )
        for dtype, name in ((bf16, "bf16"), (fp32, "fp32")):
            add(f"causal prefill 1024, head {d}", name, 1.0, square / 32, prefill(dtype, 1024, d, True))
            add(f"full prefill 2048, head {d}", name, 1.0, square / 4, prefill(dtype, 2048, d, False))
    for dtype, name in ((bf16, "bf16"), (fp32, "fp32")):
        for n in (1, 8, 32, 128):
            add(
                f"12 heads, {n} tokens, head 64",
                name,
                1.0,
                24.0 * n * n * 64,
                prefill(dtype, n, 64, True, heads=12),
            )
        target = 12.0 if name == "bf16" else 1.0
        add(
            "decode, 32/8 heads, 4096 keys, head 128",
            name,
            target,
            4.0 * 32 * 4096 * 128,
            decode(dtype, 32, 8, 4096, 128),
        )
        add(
            "decode, 8/8 heads, 4096 keys, head 128",
            name,
            1.0,
            4.0 * 8 * 4096 * 128,
            decode(dtype, 8, 8, 4096, 128),
        )
        add("window 256 of 4096, head 64", name, 1.0, 8.0 * 4096 * 256 * 64, windowed(dtype, 4096, 64, 256))
        add(
            "8 documents of 512 packed, head 64",
            name,
            1.0,
            4.0 * 8 * 512 * 512 * 64,
            packed(dtype, 8, 512, 64),
        )
        goal = 1.6 if name == "bf16" else None
        for d in (64, 128):
            add(
                f"forward + backward, causal 2048, head {d}",
                name,
                goal,
                14.0 * 2048 * 2048 * d,
                training(dtype, 2, 2048, d),
            )
    add(
        "decode, 32/8 heads, 4096 int8 keys, head 128",
        "int8",
        20.0,
        4.0 * 32 * 4096 * 128,
        decode(bf16, 32, 8, 4096, 128, True),
    )
    return cells


def measure_grid(seconds: float) -> list[Cell]:
    """Padded, packed and windowed calls against the torch-only backend."""
    _grid()
    cells = []
    for dtype, kind in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for name, structure in GRID.items():
            cells.append(compare(name, kind, 1.0, 0.0, structured(dtype, structure, 64), seconds))
    return cells


def measure_two(seconds: float) -> list[Cell]:
    """Some of the cells with two threads."""
    bf16, fp32 = torch.bfloat16, torch.float32
    cells = []
    for d, goals in ((64, (2.6, 3.5, 1.15)), (128, (2.6, 3.5, 1.15))):
        flops = 4.0 * 2 * 4096 * 4096 * d / 2
        name = f"causal prefill 4096, head {d}"
        cells.append(compare(name, "bf16", goals[0], flops, prefill(bf16, 4096, d, True), seconds))
        int8 = (prefill(fp32, 4096, d, True, "int8")[0], prefill(bf16, 4096, d, True)[1])
        cells.append(compare(f"{name}, int8 products", "int8", goals[1], flops, int8, seconds))
        cells.append(compare(name, "fp32", goals[2], flops, prefill(fp32, 4096, d, True), seconds))
    step = "decode, 32/8 heads, 4096 keys, head 128"
    flops = 4.0 * 32 * 4096 * 128
    cells.append(compare(step, "bf16", 12.0, flops, decode(bf16, 32, 8, 4096, 128), seconds))
    cells.append(compare(step, "fp32", 1.0, flops, decode(fp32, 32, 8, 4096, 128), seconds))
    cells.append(
        compare(f"{step}, int8 keys", "int8", 20.0, flops, decode(bf16, 32, 8, 4096, 128, True), seconds)
    )
    flops = 14.0 * 2048 * 2048 * 64
    cells.append(
        compare(
            "forward + backward, causal 2048, head 64",
            "bf16",
            1.6,
            flops,
            training(bf16, 2, 2048, 64),
            seconds,
        )
    )
    return cells


def provenance(peaks: dict[str, float]) -> dict[str, object]:
    """What the numbers were measured with."""
    native = library()
    assert native is not None
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout
    model = "unknown"
    if Path("/proc/cpuinfo").is_file():
        lines = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        model = lines[0].split(":")[1].strip() if lines else model
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.strip(),
        "cpu": model,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "level": native.level_name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "matrix_peak_gflops": peaks,
    }


def _rows(cells: list[Cell], peaks: dict[str, float]) -> list[str]:
    lines = [
        "| call | dtype | ms (wall) | other ms (wall) | ratio | target | GFLOP/s | share |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for c in cells:
        share = (
            f"{100 * c.gflops / peaks[c.dtype] / c.threads:.0f} %"
            if c.dtype in peaks and "prefill" in c.name
            else "-"
        )
        goal = (
            "-" if c.target is None else f"{c.target:g}" + ("" if c.ratio >= c.target else " **not reached**")
        )
        lines.append(
            f"| {c.name} | {c.dtype} | {c.native_ms:.3f} ({c.native_wall_ms:.3f}) | {c.stock_ms:.3f} "
            f"({c.stock_wall_ms:.3f}) | {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}] | {goal} | "
            f"{c.gflops:.0f} | {share} |"
        )
    return lines


def table(origin: dict[str, object], one: list[Cell], grid: list[Cell], two: list[Cell]) -> str:
    """The result as Markdown."""
    peaks = origin["matrix_peak_gflops"]
    assert isinstance(peaks, dict)
    return (
        "\n".join(
            [
                "# Native CPU kernels against torch",
                "",
                "Made by `make bench-native` (`tests/native/bench_native.py`); the numbers lie in the JSON of this name. Ratio: time "
                "of `scaled_dot_product_attention` (packed documents: one call each; int8: stock bf16) over ours, interleaved in "
                "one process, median [quartiles]. Share: of the matrix peak of torch's own matrix product with one thread "
                f"(bf16 {peaks['bf16']:.0f}, fp32 {peaks['fp32']:.0f} GFLOP/s), counting the products that are asked for alone.",
                "",
                f"{origin['cpu']}, level {origin['level']}, torch {origin['torch']}, {origin['date']}, commit "
                f"{origin['commit']}.",
                "",
                "## One thread, process time",
                "",
                *_rows(one, peaks),
                "",
                "## Two threads, the shortest wall times of all rounds [quartiles of the ratio over rounds]",
                "",
                *_rows(two, peaks),
                "",
                "## Padded, packed and windowed calls against the torch-only backend (`adaattn_sdpa`), one thread, process time",
                "",
                "4 query heads of 64 on 2 key/value heads.",
                "",
                *_rows(grid, peaks),
            ]
        )
        + "\n"
    )


def write(path: Path, text: str) -> None:
    """Replaces the file at once."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def main() -> int:
    """Measures, prints, and writes when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="per cell")
    parser.add_argument("--write", type=Path, help="directory for NAME.json and NAME.md")
    parser.add_argument("--name", default="native_cpu", help="of the files; another one for another machine")
    asked = parser.parse_args()
    if missing():
        print("; ".join(missing()))
        return 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    peaks = {"bf16": peak(torch.bfloat16), "fp32": peak(torch.float32)}
    one, grid = measure(asked.seconds), measure_grid(asked.seconds / 2)
    torch.set_num_threads(2)
    two = measure_two(asked.seconds)
    origin = provenance(peaks)
    text = table(origin, one, grid, two)
    print(text)
    if asked.write:
        asked.write.mkdir(parents=True, exist_ok=True)
        record = {"provenance": origin, "cells": [asdict(cell) for cell in (*one, *two, *grid)]}
        write(asked.write / f"{asked.name}.json", json.dumps(record, indent=1) + "\n")
        write(asked.write / f"{asked.name}.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
