"""All ways to do a cell's work by name: implementations of Transformers, and sdpa's kernels apart."""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import some_rows
from adaattn_hf.errors import UsageError
from adaattn_hf.patches.observe.spans import spans

from .grid import Cell, Grid
from .model import model_works
from .processes import process_works
from .work import Work, attention_works, structure_of, tensors_of

KERNELS = {
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:math": SDPBackend.MATH,
}
"""Stock sdpa with one of torch's kernels alone; one that cannot do a cell refuses it."""
_ROWS = 16


def ways(cell: Cell, grid: Grid, device: torch.device) -> Callable[[str], Work]:
    """Makes of a way's name the work of a cell."""
    if cell.arms:
        if device.type != "cpu":
            raise UsageError(f"device: got {device}, expected cpu: the arms of {cell.title} run there")
        return process_works(cell, grid)
    made = attention_works(cell, device) if cell.level == "attention" else model_works(cell, grid.models, device)
    make = functools.cache(made)  # the kernels of sdpa share its work, and so a model

    def named(name: str) -> Work:
        if name not in KERNELS:
            return make(name)
        stock = make("sdpa")

        def work() -> Any:
            with sdpa_kernel(KERNELS[name]):
                return stock()

        return work

    return named


def shape_of(cell: Cell, grid: Grid) -> dict[str, Any]:
    """The shape of a cell's work as fields of its record; of whole models their configuration."""
    shape = asdict(cell)
    for name in ("name", "level", "dtype", "floor", "without", "arms"):
        del shape[name]
    shape["kv_len"] = cell.keys
    if cell.model is not None:
        for name in ("layers", "heads", "kv_heads", "head_dim"):
            del shape[name]
        model = grid.models[cell.model]
        shape["configuration"] = model.get("arguments") or {"directory": Path(model.get("directory", "")).name}
    return shape


def error_of(cell: Cell, device: torch.device) -> Callable[[Tensor], float] | None:
    """Gives an output's largest error on a few rows, relative to the largest value of attention in double precision.

    None for whole models, which have no such reference.
    """
    if cell.level != "attention":
        return None
    query, key, value = (tensor.detach() for tensor in tensors_of(cell, device))
    call = AttentionCall(query, key, value, structure_of(cell, device), cell.head_dim**-0.5)
    rows = torch.linspace(0, cell.q_len - 1, min(_ROWS, cell.q_len), dtype=torch.float32, device="cpu").long()
    sampled = some_rows(call, rows)
    truth = reference.attention(sampled).out
    # rows that see nothing are zero in ours, and an average over something in stock attention
    real = sampled.structure.visible(device=device).any(-1).expand(cell.batch, 1, len(rows))[:, 0]

    def error(out: Tensor) -> float:
        wrong = (out.detach()[:, rows.to(out.device)].double() - truth.double())[real]
        return float(wrong.abs().max() / truth[real].abs().max())

    return error


def trace(works: Mapping[str, Work], directory: Path, title: str, device: torch.device) -> None:
    """Writes one Chrome trace per way: its work once, warm, with a span around each attention call of ours.

    Beside it goes a table of the operators, on a GPU kernels, that took most time.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    directory.mkdir(parents=True, exist_ok=True)
    for name, work in works.items():
        marked = spans() if name.startswith("adaattn") else contextlib.nullcontext()
        with torch.profiler.profile(activities=kinds) as seen, marked:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        plain = re.sub(r"[^A-Za-z0-9]+", "-", f"{title} {name}").strip("-")
        seen.export_chrome_trace(str(directory / f"{plain}.json"))
        clock = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
        longest = seen.key_averages().table(sort_by=clock, row_limit=20)
        (directory / f"{plain}.txt").write_text(longest, encoding="utf-8")
