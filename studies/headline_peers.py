"""The table of docs/comparison.md: every implementation beside AdaAttn in the same cells, or why it was not timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaattn_hf.errors import UsageError

from .pages import commit, machine, table

SHOWN = {
    "bench": ("causal 4k (float32)", "left-padded prompts (float32)", "packed 8 x 512 (float32)"),
}
"""Cells of each report of `adaattn bench`."""
UNTIMED = {
    "xFormers": "not timed: no name in Transformers; the wheel of 0.0.35 is for CUDA 12.8",
    "SageAttention": "not timed: no name in Transformers; CUDA, 8 bits, no padding masks",
    "FlashInfer": "not timed: for engines, no name in Transformers; compiles CUDA kernels at run time",
    "ModelOpt skip-softmax": "approximate: [at its loss](figures.md#beside-other-libraries)",
    "kvpress": "approximate: [at its loss](figures.md#beside-other-libraries), with Transformers below 5.3",
}
"""What `adaattn bench` does not time, and why."""


def peers(reports: Mapping[str, Any]) -> str:
    """The table: stock's time over ours, cell by cell, each with its machine and commit.

    Raises:
        UsageError: A cell was not measured, or names no commit.
    """
    columns: list[tuple[str, Mapping[str, Any]]] = []
    ways: dict[str, None] = {}
    absent: dict[str, str] = {}
    for name, titles in SHOWN.items():
        report = reports[name]
        absent |= report["absent"]
        for title in titles:
            cells = [cell for cell in report["cells"] if cell["title"] == title and cell["commit"]]
            if not cells:
                raise UsageError(f"{name}.json: {title!r} was not measured, or nobody knows at which commit")
            where = f"{machine(report['provenance'])}, {commit(cells[0])}"
            columns.append((f"{title}; {where}", cells[0]))
            ways |= dict.fromkeys([*cells[0]["ratios"], *cells[0]["refused"]])
    rows = [(f"`{way}`", *(_entry(cell, way) for _, cell in columns), absent.get(way, "")) for way in ways]
    lacking = [*((f"`{way}`", f"not timed: {why}") for way, why in absent.items() if way not in ways), *UNTIMED.items()]
    rows += [(way, *("–" for _ in columns), why) for way, why in lacking]
    return "\n".join(table(("", *(head for head, _ in columns), "otherwise"), rows)[:-1])


def _entry(cell: Mapping[str, Any], way: str) -> str:
    """How many times its time is ours, or that it refuses the cell."""
    if way in cell["ratios"]:
        return f"{cell['ratios'][way]['wall']['median']:.2f}"
    return "refuses" if way in cell["refused"] else "–"
