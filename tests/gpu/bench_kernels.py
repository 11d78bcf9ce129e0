"""Time the CUDA backends against one another, call by call: `python tests/gpu/bench_kernels.py --write docs/results`.

The order of backends in `adaattn_hf.backends.select` rests on this table. Medians of CUDA-event times with a cold L2
(`triton.testing.do_bench`), host overhead included where it is longer than the kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from adaattn_hf.attention.request import AttentionRequest, CallSpec
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.select import BACKENDS, refusals_of
from adaattn_hf.eval.provenance import provenance

COLUMNS = ("torch", "fa3", "fa3_fwd", "fa2", "triton", "sdpa")


def cells() -> dict[str, tuple[CallStructure, int, int, int]]:
    """Structure, query heads, key/value heads and head size of each cell."""
    n = 4096
    left = torch.ones(8, n, dtype=torch.bool)
    many = torch.ones(32, n, dtype=torch.bool)
    for row in range(8):
        left[row, : n * row // 8] = False
    for row in range(32):
        many[row, : n * row // 32] = False
    documents = torch.repeat_interleave(torch.arange(8), 512)[None]
    full, step = {"causal": True}, {"causal": True}
    return {
        "causal 4 x 4k": (CallStructure(4, n, n, **full), 32, 8, 128),
        "causal 8 x 2k, head 64": (CallStructure(8, 2048, 2048, **full), 16, 16, 64),
        "full 32 x 512, head 64": (CallStructure(32, 512, 512), 12, 12, 64),
        "left-padded 8 x 4k": (CallStructure(8, n, n, key_padding=left, **step), 32, 8, 128),
        "packed 8 x 512": (
            CallStructure(1, n, n, q_segments=documents, k_segments=documents, **full),
            32,
            8,
            128,
        ),
        "window 1k at 16k": (CallStructure(1, 16384, 16384, window=1024, **full), 32, 8, 128),
        "512 queries behind 7.5k": (CallStructure(4, 512, 8192, q_offset=7680, **full), 32, 8, 128),
        "decode 8 x 16k": (CallStructure(8, 1, 16384, q_offset=16383, **full), 32, 8, 128),
        "decode 1 x 4k": (CallStructure(1, 1, n, q_offset=n - 1, **full), 32, 8, 128),
        "left-padded decode 32 x 4k": (
            CallStructure(32, 1, n, q_offset=n - 1, key_padding=many, **full),
            32,
            8,
            128,
        ),
        "decode, 4k of 16k in use": (
            CallStructure(8, 1, 16384, q_offset=torch.tensor(4095), **full),
            32,
            8,
            128,
        ),
    }


def microseconds(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    call()
    return float(do_bench(call, warmup=20, rep=60, return_mode="median")) * 1e3


def stock(request: AttentionRequest) -> Callable[[], Any]:
    """What Transformers' `sdpa` does: the causal flag where it can, else a dense mask and repeated heads."""
    s, q, k, v = request.structure, request.query, request.key, request.value
    groups = q.shape[1] // k.shape[1]
    if s.kind in ("full", "causal") or (s.plain and s.q_len == 1 and not s.windowed):
        return lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=s.kind == "causal", enable_gqa=groups > 1
        )
    mask = s.visible(device=q.device).expand(s.batch, 1, s.q_len, s.kv_len)
    return lambda: F.scaled_dot_product_attention(
        q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), attn_mask=mask
    )


def measure() -> list[dict[str, Any]]:
    rows = []
    for name, (structure, heads, kv_heads, dim) in cells().items():
        moved = {k: v.cuda() for k, v in vars(structure).items() if isinstance(v, torch.Tensor)}
        s = structure.with_changes(**moved)

        def draw(length: int, count: int, s: CallStructure = s, dim: int = dim) -> torch.Tensor:
            return torch.randn(s.batch, length, count, dim, device="cuda", dtype=torch.bfloat16).transpose(
                1, 2
            )

        q, k, v = draw(s.q_len, heads), draw(s.kv_len, kv_heads), draw(s.kv_len, kv_heads)
        if s.q_len == 1:
            k, v = k.contiguous(), v.contiguous()
        request = AttentionRequest(q, k, v, s, scaling=dim**-0.5)
        row: dict[str, Any] = {"cell": name, "torch": microseconds(stock(request))}
        for backend in COLUMNS[1:]:
            reasons = refusals_of(backend, CallSpec.of(request))
            row[backend] = (
                None if reasons else microseconds(lambda b=backend, r=request: BACKENDS[b].attend(r))
            )
        rows.append(row)
        print(row, flush=True)
    return rows


def table(report: dict[str, Any]) -> str:
    lines = [
        "# CUDA backends against one another",
        "",
        f"{report['device']}, torch {report['torch']}, bfloat16, microseconds per call. "
        "Made by `tests/gpu/bench_kernels.py`; – where a backend is absent or refuses.",
        "",
        "| call | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for row in report["rows"]:
        figures = (row.get(c) for c in COLUMNS)
        lines.append(
            f"| {row['cell']} | " + " | ".join("–" if f is None else f"{f:.1f}" for f in figures) + " |"
        )
    if report.get("note"):
        lines += ["", report["note"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="directory for gpu_kernels.json and gpu_kernels.md")
    where: Path | None = parser.parse_args().write
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "provenance": provenance(torch.device("cuda")),
        "rows": measure(),
    }
    if where is not None:
        (where / "gpu_kernels.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (where / "gpu_kernels.md").write_text(table(result), encoding="utf-8")
