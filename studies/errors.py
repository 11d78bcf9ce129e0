"""Errors of the backends by dtype and stage: `make errors` prints them and writes docs/results/errors.*.

Each backend computes the same calls as the reference in double precision: a prefill, a padded batch, one decode step
and a backward pass, on Gaussian queries, keys and values that were rounded to the dtype first: what is measured is
the computation. Triton's kernels run in its interpreter where there is no CUDA device, which has no bfloat16.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from adaattn_hf._files import write_atomically
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.eval.provenance import processor, provenance
from adaattn_hf.stats.profile import decibels

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NAMES = ("eager", "sdpa", "native", "triton")
STAGES = ("prefill", "padded", "decode", "backward")


@dataclass(frozen=True)
class Error:
    """Errors of one backend in one dtype at one stage, against double precision."""

    backend: str
    dtype: str
    stage: str
    largest: float  # absolute difference
    relative: float  # norm of the difference over the norm of the result
    sqnr: float  # the same in decibels: signal over noise


def call(stage: str, dtype: torch.dtype, device: str = "cpu") -> AttentionCall:
    """The call of a stage: 4 query heads over 2 key/value heads of 64 channels, 96 keys."""
    source = torch.Generator().manual_seed(0)
    rows = 1 if stage == "decode" else 96
    query, key, value = (
        torch.randn(2, heads, length, 64, generator=source).to(dtype).to(device)
        for heads, length in ((4, rows), (2, 96), (2, 96))
    )
    structure = MaskStructure(2, rows, 96, causal=True, q_offset=96 - rows)
    if stage == "padded":
        padding = torch.ones(2, 96, dtype=torch.bool, device=device)
        padding[1, :31] = False
        structure = MaskStructure(2, rows, 96, causal=True, key_padding=padding)
    return AttentionCall(query, key, value, structure, 64**-0.5)


def results(asked: AttentionCall, stage: str, backend: str | None, dtype: torch.dtype) -> Tensor:
    """Output of a call, or gradients of query, key and value in a row; the reference's where no backend is named.

    Gradients are of a sum whose weights were rounded to the dtype.
    """

    def attend(one: AttentionCall) -> Tensor:
        # whether it refuses is not asked: Triton's interpreter computes on CPUs
        kind = one.checked_kind(named=True)
        return (reference.attention(one) if backend is None else BACKENDS[backend].kernel(kind, None)(one)).out

    if stage != "backward":
        with torch.no_grad():
            return attend(asked).double()
    leaves = [t.detach().clone().requires_grad_() for t in (asked.query, asked.key, asked.value)]
    out = attend(replace(asked, query=leaves[0], key=leaves[1], value=leaves[2]))
    source = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=source).to(dtype).to(out)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    return torch.cat([t.double().reshape(-1) for t in found])


def measure(backend: str, dtype: str, stage: str) -> Error | None:
    """The errors of one cell; None where the backend does not serve it."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    if backend == "triton" and dtype == "float32" and stage != "decode":
        return None  # half precision, and decode in fp32
    if backend == "triton" and device == "cpu" and dtype == "bfloat16":
        return None  # the interpreter computes with NumPy, which has no bfloat16
    kind = DTYPES[dtype]
    asked = wide = call(stage, kind, device)
    if stage == "backward":  # gradients in double precision, of the rounded numbers
        wide = replace(asked, query=asked.query.double(), key=asked.key.double(), value=asked.value.double())
    truth, found = results(wide, stage, None, kind), results(asked, stage, backend, kind)
    difference = (found - truth).abs()
    relative = float(difference.norm() / truth.norm())
    noise = float(decibels(truth.square().sum(), difference.square().sum()))
    return Error(backend, dtype, stage, float(difference.max()), relative, noise)


def table(errors: list[Error], origin: Mapping[str, Any]) -> str:
    """The page."""
    gpu = f"on {origin['device']} ({origin['driver']})"
    where = "in its interpreter" if origin["device"] == "cpu" else gpu
    lines = [
        "# Errors by dtype and stage",
        "",
        "Made by `make errors` (`studies/errors.py`); the numbers lie in `errors.json`. Against attention in double "
        "precision on the same rounded numbers: largest difference, relative difference (norms), signal to noise.",
        "",
        f"{processor(origin)}; Triton's kernels {where}; torch {origin['versions']['torch']}, "
        f"commit {origin['commit']}.",
        "",
        "| backend | stage | dtype | largest | relative | dB |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| `{e.backend}` | {e.stage} | {e.dtype} | {e.largest:.1e} | {e.relative:.1e} | {e.sqnr:.1f} |" for e in errors
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures, prints, and writes to the directory that is named."""
    torch.set_num_threads(1)
    cells = [measure(b, d, s) for b in NAMES for s in STAGES for d in DTYPES]
    errors = [cell for cell in cells if cell is not None]
    origin = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    text = table(errors, origin)
    print(text)
    for directory in map(Path, sys.argv[1:]):
        data = {"provenance": origin, "errors": [asdict(e) for e in errors]}
        write_atomically(directory / "errors.json", json.dumps(data, indent=1) + "\n")
        write_atomically(directory / "errors.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
