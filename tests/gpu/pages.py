"""What plans cost on a CUDA device, beside torch and flash-attn: `python tests/gpu/pages.py --write docs/results`.

Medians of CUDA-event times with a cold L2 (`triton.testing.do_bench`), host time included where it is longer than the
kernels; `captured` is the replay of a CUDA graph. Ratios are to `scaled_dot_product_attention` in the same run. The
commit is taken from git, or from the variable ADAATTN_COMMIT where there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn_hf.attention.blocks import picked_blocks
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.request import AttentionRequest, AttentionResult, CallSpec
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.select import BACKENDS, refusals_of

Cell = dict[str, Any]
HEADS, KV_HEADS, DIM = 32, 8, 128
PLANS = {
    "every second head 1024+16": (0, 1024) * 4,
    "all heads 1024+16": (1024,) * 8,
    "mixed: 2 exact, 3 × 1024, 2 × 4096, 1 × 256": (0, 0, 1024, 1024, 1024, 4096, 4096, 256),
}


def microseconds(call: Callable[[], Any], rep: int = 40) -> float:
    from triton.testing import do_bench

    call()
    torch.cuda.synchronize()
    return float(do_bench(call, warmup=10, rep=rep, return_mode="median")) * 1e3


def draw(batch: int, length: int, heads: int, dim: int = DIM, grad: bool = False) -> Tensor:
    made = torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return made.requires_grad_(grad)


def request(
    structure: CallStructure, rules: HeadRules | None = None, grad: bool = False, **shape: int
) -> AttentionRequest:
    s, heads, kv_heads = structure, shape.get("heads", HEADS), shape.get("kv_heads", KV_HEADS)
    dim = shape.get("dim", DIM)
    q, k, v = (
        draw(s.batch, n, h, dim, grad)
        for n, h in ((s.q_len, heads), (s.kv_len, kv_heads), (s.kv_len, kv_heads))
    )
    if s.q_len == 1:
        k, v = k.contiguous(), v.contiguous()
    return AttentionRequest(q, k, v, s, scaling=dim**-0.5, per_head=rules)


def rules_of(windows: tuple[int, ...]) -> HeadRules:
    sinks = tuple(16 if window else 0 for window in windows)
    return HeadRules(windows, sinks, (0.0,) * len(windows), ("model",) * len(windows))


def stock(r: AttentionRequest) -> Callable[[], Any]:
    """torch's operator without a mask: exact attention of the same tensors."""
    causal = r.structure.q_len > 1 and r.structure.causal
    return lambda: F.scaled_dot_product_attention(
        r.query, r.key, r.value, is_causal=causal, enable_gqa=r.query.shape[1] != r.key.shape[1]
    )


def timed(r: AttentionRequest, backend: str) -> float | None:
    """Microseconds of a backend, None where it refuses or is absent."""
    if refusals_of(backend, CallSpec.of(r, look=True)):
        return None
    return microseconds(lambda: BACKENDS[backend].attend(r))


def dense() -> list[Cell]:
    """Exact causal attention."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    peak = 2 * 8192**3 / microseconds(lambda: a @ a) * 1e-6
    cells: list[Cell] = [{"cell": "8192³ matrix product", "matmul": peak}]
    shapes = [(1, 16384, 16, 16, 128), (4, 4096, 32, 8, 128), (2, 8192, 32, 32, 64), (1, 32768, 32, 8, 128)]
    for batch, n, heads, kv_heads, dim in shapes:
        r = request(CallStructure(batch, n, n, causal=True), heads=heads, kv_heads=kv_heads, dim=dim)
        work = 2 * batch * heads * n * n * dim * 1e-6
        row: Cell = {"cell": f"{batch} × {n // 1024}k, {heads}/{kv_heads} × {dim}"}
        row["sdpa"] = work / microseconds(stock(r))
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(kernel):
                row[kernel.name.split("_")[0].lower()] = work / microseconds(stock(r))
        for name in ("fa3_fwd", "fa4", "triton"):
            found = timed(r, name)
            row[name] = None if found is None else work / found
        row["auto"] = work / microseconds(lambda r=r: select.attend(r))
        cells.append(row)
    return cells


def read_keys(n: int, windows: tuple[int, ...]) -> float:
    """Share of the causal pairs that heads of these windows see."""
    rows = torch.arange(1, n + 1, dtype=torch.float64)
    seen = [rows.sum() if not w else torch.minimum(rows, torch.tensor(w + 16.0)).sum() for w in windows]
    return float(sum(seen)) / (len(windows) * float(rows.sum()))


def flex(r: AttentionRequest, windows: tuple[int, ...]) -> float:
    """torch's flex attention, compiled, with the same mask per head."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    table = torch.tensor([w or 1 << 30 for w in windows], device="cuda").repeat_interleave(HEADS // KV_HEADS)

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k < table[h]) | (k < 16))

    n = r.structure.q_len
    blocks = create_block_mask(mask, None, HEADS, n, n, device="cuda", _compile=True)
    run = torch.compile(flex_attention)
    return microseconds(lambda: run(r.query, r.key, r.value, block_mask=blocks, enable_gqa=True))


def prefill() -> list[Cell]:
    """Windows per head in one launch."""
    cells = []
    for n in (8192, 32768):
        for name, windows in PLANS.items():
            structure = CallStructure(1, n, n, causal=True)
            r = request(structure, rules_of(windows))
            row: Cell = {"cell": f"{n // 1024}k, {name}", "ideal ×": 1 / read_keys(n, windows)}
            row["sdpa"] = microseconds(stock(r))
            for backend in ("fa4", "triton"):
                row[backend] = timed(r, backend)
            if name.startswith("mixed"):
                row["flex"] = flex(r, windows)
            row["exact, auto"] = microseconds(lambda r=r: select.attend(request_without(r)))
            cells.append(row)
    return cells


def request_without(r: AttentionRequest) -> AttentionRequest:
    return AttentionRequest(r.query, r.key, r.value, r.structure, r.scaling)


def decode() -> list[Cell]:
    """One query per sequence over a cache."""
    cells = []
    for batch, n in ((1, 32768), (8, 32768), (1, 131072)):
        r = request(CallStructure(batch, 1, n, causal=True, q_offset=n - 1))
        base = microseconds(stock(r))
        cells += [step(r, name, windows, base) for name, windows in {"exact": (0,) * 8, **PLANS}.items()]
    return cells


def step(r: AttentionRequest, name: str, windows: tuple[int, ...], base: float) -> Cell:
    """One plan in one cache."""
    batch, n = r.structure.batch, r.structure.kv_len
    r.per_head = rules_of(windows) if any(windows) else None
    row: Cell = {"cell": f"{batch} × {n // 1024}k, {name}", "sdpa": base}
    row["triton"] = microseconds(lambda: BACKENDS["triton"].attend(r))
    row["captured"] = microseconds(captured(lambda: BACKENDS["triton"].attend(r)))
    keys = sum(min(w + 16, n) if w else n for w in windows)
    row["TB/s"] = 4.0 * batch * keys * DIM / row["captured"] * 1e-6
    return row


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A CUDA graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def training() -> list[Cell]:
    """Forward and backward at 16k."""
    n = 16384
    documents = torch.repeat_interleave(torch.arange(16), 1024)[None].cuda()
    made: dict[str, tuple[CallStructure, HeadRules | None]] = {
        "window 1024": (CallStructure(1, n, n, causal=True, window=1024), None),
        "packed 16 × 1k": (
            CallStructure(1, n, n, causal=True, q_segments=documents, k_segments=documents),
            None,
        ),
        "every second head 1024+16": (CallStructure(1, n, n, causal=True), rules_of((0, 1024) * 4)),
        "causal": (CallStructure(1, n, n, causal=True), None),
    }
    return [trained(name, structure, rules) for name, (structure, rules) in made.items()]


def trained(name: str, structure: CallStructure, rules: HeadRules | None) -> Cell:
    """Both passes of one structure."""
    r = request(structure, rules, grad=True)
    grad = torch.randn(1, structure.q_len, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    inputs = (r.query, r.key, r.value)

    def both(attend: Callable[[AttentionRequest], AttentionResult]) -> float:
        return microseconds(lambda: torch.autograd.grad(attend(r).out, inputs, grad))

    exact = stock(r)
    row: Cell = {"cell": name}
    row["sdpa, causal"] = microseconds(lambda: torch.autograd.grad(exact(), inputs, grad.transpose(1, 2)))
    for backend in ("fa4", "triton"):
        refused = refusals_of(backend, CallSpec.of(r))
        row[backend] = None if refused else both(BACKENDS[backend].attend)
    row["auto"] = both(select.attend)
    return row


def clustered(n: int, block: int) -> AttentionRequest:
    """Queries that look at two of eight clusters of key blocks, as heads do that look up by content."""
    count = n // block
    of_block = torch.randint(8, (KV_HEADS, count), device="cuda")
    centres = torch.randn(KV_HEADS, 8, DIM, device="cuda")
    keys = torch.gather(centres, 1, of_block[:, :, None].expand(-1, -1, DIM)).repeat_interleave(block, 1)
    two = torch.rand(KV_HEADS, n // 128, 8, device="cuda").topk(2).indices
    wanted = sum(torch.gather(centres, 1, two[:, :, i, None].expand(-1, -1, DIM)) for i in (0, 1))
    query = wanted.repeat_interleave(128, 1).repeat_interleave(HEADS // KV_HEADS, 0)  # type: ignore[union-attr]
    r = request(CallStructure(1, n, n, causal=True))
    r.query, r.key = r.query + query.bfloat16()[None], r.key + keys.bfloat16()[None]
    return r


def blocks() -> list[Cell]:
    """Kept blocks of keys, their choice included."""
    cells = []
    for n in (8192, 32768):
        for block in (64, 128):
            r = clustered(n, block)
            r.per_head = HeadRules((0,) * 8, (16,) * 8, (0.95,) * 8, ("model",) * 8, block)
            segments = r.structure.segments()
            kept = picked_blocks(r, segments[0], 0.95, 16, [0], block)  # type: ignore[index]
            visible = sum(row // block + 1 for row in range(n))
            row: Cell = {"cell": f"{n // 1024}k, blocks of {block}", "density": float(kept.sum()) / visible}
            row["sdpa"] = microseconds(stock(r))
            row["triton"] = microseconds(lambda r=r: BACKENDS["triton"].attend(r))
            cells.append(row)
    return cells


def structures() -> list[Cell]:
    """Masks through `auto`, and what Transformers' sdpa does with a dense mask."""
    n = 4096
    left = torch.ones(8, n, dtype=torch.bool)
    for i in range(8):
        left[i, : n * i // 8] = False
    documents = torch.repeat_interleave(torch.arange(16), 1024)[None].cuda()
    made = {
        "left-padded 8 × 4k": CallStructure(8, n, n, causal=True, key_padding=left.cuda(), pads_queries=True),
        "packed 16 × 1k": CallStructure(
            1, 16384, 16384, causal=True, q_segments=documents, k_segments=documents
        ),
        "window 1k at 16k": CallStructure(1, 16384, 16384, causal=True, window=1024),
        "512 queries behind 7.5k": CallStructure(4, 512, 8192, causal=True, q_offset=7680),
        "static cache, 4k of 16k in use": CallStructure(
            8, 1, 16384, causal=True, q_offset=torch.tensor(4095, device="cuda")
        ),
    }
    cells = []
    for name, structure in made.items():
        r = request(structure)
        mask = structure.visible(device="cuda").expand(structure.batch, 1, structure.q_len, structure.kv_len)
        row: Cell = {"cell": name}
        row["sdpa"] = microseconds(
            lambda r=r, mask=mask: F.scaled_dot_product_attention(
                r.query, r.key.repeat_interleave(4, 1), r.value.repeat_interleave(4, 1), attn_mask=mask
            )
        )
        for backend in ("fa3_fwd", "fa4", "triton"):
            row[backend] = timed(r, backend)
        row["auto"] = microseconds(lambda r=r: select.attend(r))
        cells.append(row)
    return cells


SECTIONS: dict[str, tuple[Callable[[], list[Cell]], str]] = {
    "dense": (dense, "Exact causal attention, forward, TFLOP/s"),
    "prefill": (prefill, "Windows per head, prefill, microseconds"),
    "decode": (decode, "Windows per head, one decode step, microseconds"),
    "training": (training, "Forward and backward at 16k, microseconds"),
    "blocks": (blocks, "Kept blocks of keys, their choice included, microseconds"),
    "structures": (structures, "Masks, microseconds"),
}


def commit() -> str:
    """The commit that is measured."""
    named = os.environ.get("ADAATTN_COMMIT")
    if named:
        return named
    here = Path(__file__).resolve().parent
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def setting() -> dict[str, str]:
    """Device, driver and versions."""
    names = ("torch", "triton", "flash-attn-4", "fa3-fwd", "nvidia-cutlass-dsl")
    versions = {name: version(name) for name in names}
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "python": sys.version.split()[0],
        **versions,
    }


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def page(report: dict[str, Any]) -> str:
    """The report in Markdown; behind each time its ratio to `sdpa`."""
    facts = ", ".join(f"{key} {value}" for key, value in report["setting"].items())
    lines = [
        "# Plans on a CUDA device",
        "",
        f"Written by `tests/gpu/pages.py`. {facts}. bfloat16, 32/8 heads of 128 unless said.",
        "",
    ]
    for name, rows in report["sections"].items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += [
            f"## {SECTIONS[name][1]}",
            "",
            "| " + " | ".join(columns) + " |",
            "|---|" + "---:|" * (len(columns) - 1),
        ]
        for row in rows:
            lines.append("| " + " | ".join(shown(row, column, name) for column in columns) + " |")
        lines.append("")
    return "\n".join(lines)


PLAIN = ("sdpa", "sdpa, causal", "ideal ×", "density", "TB/s", "cell")


def shown(row: Cell, column: str, section: str) -> str:
    value = row.get(column)
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    text = f"{value:.0f}" if value >= 100 else f"{value:.2f}"
    base = row.get("sdpa", row.get("sdpa, causal"))
    if section == "dense" or column in PLAIN or base is None:
        return text
    return f"{text} ({base / value:.2f}×)"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="directory for gpu_plans.json and gpu_plans.md")
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS))
    arguments = parser.parse_args()
    result: dict[str, Any] = {"setting": setting(), "sections": {}}
    if arguments.write is not None and (arguments.write / "gpu_plans.json").exists():
        before = json.loads((arguments.write / "gpu_plans.json").read_text(encoding="utf-8"))
        if before["setting"] == result["setting"]:
            result = before
    for section in arguments.sections:
        started = time.perf_counter()
        result["sections"][section] = SECTIONS[section][0]()
        for cell in result["sections"][section]:
            print({key: round(x, 2) if isinstance(x, float) else x for key, x in cell.items()}, flush=True)
        print(f"--- {section}: {time.perf_counter() - started:.0f} s", flush=True)
        if arguments.write is not None:
            (arguments.write / "gpu_plans.json").write_text(
                json.dumps(result, indent=1) + "\n", encoding="utf-8"
            )
            (arguments.write / "gpu_plans.md").write_text(page(result), encoding="utf-8")
