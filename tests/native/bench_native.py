# ruff: noqa: E501
"""Times the native kernels against torch's own, interleaved in one process, and writes the table.

`python tests/native/bench_native.py [--threads N] [--seconds S] [--write docs/results]`. Ratios are of process time
(cores are shared with other programs, wall time is printed beside it); median over rounds with the quartiles.
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

from adaattn_hf.backends.native import call
from adaattn_hf.backends.native.autograd import Differentiable
from adaattn_hf.backends.native.call import Rules
from adaattn_hf.backends.native.library import library, missing
from adaattn_hf.stats.noise import quantise


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    name: str
    dtype: str
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
    ratios = sorted(r[2] / r[0] for r in rows)
    quartiles = statistics.quantiles(ratios, n=4)
    cell = Cell(
        name, dtype, target, flops,
        *(1e3 * c for c in columns), statistics.median(ratios), quartiles[0], quartiles[2], flops / columns[0] / 1e9,
    )  # fmt: skip
    print(f"{cell.dtype:9} {cell.name:44} {cell.native_ms:9.3f} ms  {cell.ratio:6.2f}x", flush=True)
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


def provenance(threads: int, peaks: dict[str, float]) -> dict[str, object]:
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
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "matrix_peak_gflops": peaks,
    }


def table(origin: dict[str, object], cells: list[Cell]) -> str:
    """The result as Markdown."""
    peaks = origin["matrix_peak_gflops"]
    assert isinstance(peaks, dict)
    lines = [
        "# Native CPU kernels against torch",
        "",
        "Made by `tests/native/bench_native.py`; the numbers lie in `native_cpu.json`. Ratio: process time of "
        "`scaled_dot_product_attention` (packed documents: one call each; int8: stock bf16) over ours, interleaved in one "
        "process, median [quartiles]. Share: of the process-time matrix peak of torch's own matrix product "
        f"(bf16 {peaks['bf16']:.0f}, fp32 {peaks['fp32']:.0f} GFLOP/s).",
        "",
        f"{origin['cpu']}, {origin['threads']} thread(s), level {origin['level']}, torch {origin['torch']}, "
        f"{origin['date']}, commit {origin['commit']}.",
        "",
        "| call | dtype | ms (wall) | stock ms (wall) | ratio | target | GFLOP/s | share |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for c in cells:
        share = (
            f"{100 * c.gflops / peaks[c.dtype]:.0f} %" if c.dtype in peaks and "prefill" in c.name else "-"
        )
        goal = (
            "-" if c.target is None else f"{c.target:g}" + ("" if c.ratio >= c.target else " **not reached**")
        )
        lines.append(
            f"| {c.name} | {c.dtype} | {c.native_ms:.3f} ({c.native_wall_ms:.3f}) | {c.stock_ms:.3f} "
            f"({c.stock_wall_ms:.3f}) | {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}] | {goal} | {c.gflops:.0f} | {share} |"
        )
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Replaces the file at once."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def main() -> int:
    """Measures, prints, and writes when asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per cell")
    parser.add_argument("--write", type=Path, help="directory for native_cpu.json and native_cpu.md")
    asked = parser.parse_args()
    if missing():
        print("; ".join(missing()))
        return 1
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    peaks = {"bf16": peak(torch.bfloat16), "fp32": peak(torch.float32)}
    cells = measure(asked.seconds)
    origin = provenance(asked.threads, peaks)
    text = table(origin, cells)
    print(text)
    if asked.write:
        asked.write.mkdir(parents=True, exist_ok=True)
        record = {"provenance": origin, "cells": [asdict(cell) for cell in cells]}
        write(asked.write / "native_cpu.json", json.dumps(record, indent=1) + "\n")
        write(asked.write / "native_cpu.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
