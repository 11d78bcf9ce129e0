"""The stopwatch of a CUDA device, requests of the shapes that are measured, and cells that are kept as they are found.

Times are medians of CUDA-event times with a cold L2 (`triton.testing.do_bench`), host time included where it is longer
than the kernels. On a CPU, where sections are tried at small sizes, kernels run in Triton's interpreter, and the
times mean nothing.
"""

import json
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from adaattn_hf._files import write_atomically
from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.eval.provenance import commit
from adaattn_hf.stats import stopwatch

Cell = dict[str, Any]
ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
DTYPE = torch.bfloat16 if ON_CUDA else torch.float16
HEADS, KV_HEADS, DIM = (32, 8, 128) if ON_CUDA else (16, 8, 32)
ROUNDS = 7 if ON_CUDA else 1
FAILURES = (RuntimeError, ValueError, TypeError, ImportError, AttributeError, AssertionError, TritonError)
"""What a call that a device or a version cannot run ends in."""
SMALLER = 1 if ON_CUDA else 128
"""What lengths and windows are divided by where sections are only tried."""
PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "fa3-fwd", "flash-attn", "nvidia-cutlass-dsl")


def length(n: int) -> int:
    """So many tokens, or the few of a trial."""
    return max(1, n // SMALLER)


def microseconds(call: Callable[[], Any], rep: int = 40) -> float:
    """Microseconds of a call, the median."""
    call()
    if not ON_CUDA:
        return stopwatch.timed(call, DEVICE)[1].wall * 1e6
    from triton.testing import do_bench

    torch.cuda.synchronize()
    return float(do_bench(call, warmup=10, rep=rep, return_mode="median")) * 1e3


def draw(batch: int, n: int, heads: int, dim: int = DIM, grad: bool = False) -> Tensor:
    """Random `[batch, heads, n, dim]`, laid out as projections leave it."""
    made = torch.randn(batch, n, heads, dim, device=DEVICE, dtype=DTYPE).transpose(1, 2)
    return made.requires_grad_(grad)


def attention_call(
    structure: MaskStructure, rules: HeadRules | None = None, grad: bool = False, **shape: int
) -> AttentionCall:
    """A call of random tensors; `shape` may name heads, kv_heads and dim."""
    s, heads, kv_heads = structure, shape.get("heads", HEADS), shape.get("kv_heads", KV_HEADS)
    dim = shape.get("dim", DIM)
    sizes = ((s.q_len, heads), (s.kv_len, kv_heads), (s.kv_len, kv_heads))
    q, k, v = (draw(s.batch, n, h, dim, grad) for n, h in sizes)
    if s.q_len == 1:
        k, v = k.contiguous(), v.contiguous()
    return AttentionCall(q, k, v, s, scaling=dim**-0.5, per_head=rules)


def rules_of(windows: tuple[int, ...]) -> HeadRules:
    """Windows of key/value heads, 0 for none, each with 16 sinks."""
    sinks = tuple(16 if window else 0 for window in windows)
    return HeadRules(windows, sinks, ("model",) * len(windows))


def stock(r: AttentionCall) -> Callable[[], Any]:
    """torch's operator without a mask: exact attention of the same tensors."""
    causal = r.structure.q_len > 1 and r.structure.causal
    return lambda: F.scaled_dot_product_attention(
        r.query, r.key, r.value, is_causal=causal, enable_gqa=r.query.shape[1] != r.key.shape[1]
    )


def refusals(backend: str, r: AttentionCall) -> tuple[str, ...]:
    """Why a backend does not serve a call; for Triton in the interpreter as if on a device."""
    spec = r.checked_kind(named=True)
    if not ON_CUDA and backend == "triton":
        spec = spec._replace(device=torch.device("cuda"))
    return select.refusals_of(backend, spec)


def by(backend: str, r: AttentionCall) -> Callable[[], AttentionResult]:
    """The call by a backend, or by what `auto` takes."""
    if backend == "auto":
        return lambda: select.attend(r)
    return lambda: select.attend(r, backend)


@dataclass
class Section:
    """Cells of a section, kept in a file as each is found, so that a run which was cut off goes on where it was."""

    path: Path
    setting: Mapping[str, Any]
    peaks: Mapping[str, float]
    cells: list[Cell] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Take what the same setting found before; what failed is tried again."""
        if self.path.is_file():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            if before["setting"] == dict(self.setting):
                self.cells = [cell for cell in before["cells"] if "failed" not in cell]
                self.seconds = before["seconds"]

    def add(self, name: str, make: Callable[[Cell], None]) -> None:
        """Measure a cell into the row that `make` is given, unless it is there; what it could not do is in the row."""
        if any(cell["cell"] == name for cell in self.cells):
            return
        row: Cell = {"cell": name}
        started = time.perf_counter()
        try:
            make(row)
        except FAILURES as error:
            row["failed"] = said(error)
        if ON_CUDA:
            torch.cuda.empty_cache()
        self.seconds += time.perf_counter() - started
        self.cells.append(row)
        kept = {"setting": self.setting, "peaks": self.peaks, "seconds": self.seconds, "cells": self.cells}
        write_atomically(self.path, json.dumps(kept, indent=1) + "\n")
        shown = {key: round(x, 2) if isinstance(x, float) else x for key, x in row.items()}
        sys.stdout.write(f"{time.perf_counter() - started:6.1f} s {shown}\n")
        sys.stdout.flush()


def said(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def race(row: Cell, arms: Mapping[str, Callable[[], Any]], rep: int = 15) -> None:
    """Microseconds of arms into a row: the median of rounds that take them in an order of their own.

    One after another they would not be alike: a device that multiplies for long lowers its clock, so that an arm behind
    one that keeps it busy is slower than the same behind one that does not; and so it would in every round, if they
    only took turns at being the first.
    """
    found: dict[str, list[float]] = {}
    for name, call in arms.items():
        try:
            call()
            found[name] = []
        except FAILURES as error:
            row[name] = None
            row.setdefault("refused", {})[name] = said(error)
    for number in range(ROUNDS):
        seed = number, zlib.crc32(row["cell"].encode())
        for name in np.random.default_rng(seed).permutation(list(found)):
            found[name].append(microseconds(arms[name], rep))
    row |= {name: statistics.median(times) for name, times in found.items()}


def timed(row: Cell, r: AttentionCall, *backends: str, beside: Mapping[str, Callable[[], Any]] | None = None) -> None:
    """Microseconds of `beside`, by default of `sdpa`, and of backends; None where one refuses, with its reasons."""
    arms: dict[str, Callable[[], Any]] = dict({"sdpa": stock(r)} if beside is None else beside)
    for backend in backends:
        refused = () if backend == "auto" else refusals(backend, r)
        if refused:
            row[backend] = None
            row.setdefault("refused", {})[backend] = refused[0]
        else:
            arms[backend] = by(backend, r)
    race(row, arms)
    if "auto" in backends:
        row["auto takes"] = select.choose(r.checked_kind()).name


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of a call."""
    if not ON_CUDA:

        def again() -> None:
            call()

        return again
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peaks() -> dict[str, float]:
    """What the device reaches: TFLOP/s of a large product in the measured dtype, TB/s of a copy, read and written."""
    n, size = (8192, 1 << 30) if ON_CUDA else (64, 1 << 12)
    a = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    product = 2 * n**3 / microseconds(lambda: a @ a) * 1e-6
    one, two = (torch.empty(size, device=DEVICE, dtype=torch.uint8) for _ in range(2))
    return {"TFLOP/s": product, "TB/s": 2 * size / microseconds(lambda: one.copy_(two)) * 1e-6}


def setting() -> dict[str, Any]:
    """Device, driver, commit and versions."""
    driver = "none"
    if ON_CUDA:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        driver = asked.stdout.strip().splitlines()[0] if asked.stdout.strip() else "unknown"
    return {
        "commit": commit(Path(select.__file__).parents[1]) or "unknown",
        "device": torch.cuda.get_device_name() if ON_CUDA else "cpu, a trial",
        "driver": driver,
        "python": sys.version.split()[0],
        **{name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
