"""The table of docs/comparison.md: every implementation in the same cases as AdaAttn, or why it was not timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaattn_hf.errors import UsageError

from .pages import commit, machine, table

SHOWN = {
    "bench": ("causal 4k (float32)", "left-padded prompts (float32)", "packed 8 x 512 (float32)"),
    "gpu": ("causal 16k (bfloat16)", "left-padded 8 x 4k, half real (bfloat16)", "packed 16 x 1k (bfloat16)"),
}
"""Cells of each report of `adaattn bench`."""
UNTIMED = {
    "xFormers": "not timed: no name in Transformers; the wheel of 0.0.35 is for CUDA 12.8",
    "SageAttention": "not timed: no name in Transformers; CUDA, 8 bits, no padding masks",
    "FlashInfer": "not timed: for engines, no name in Transformers; compiles CUDA kernels at run time",
    "ModelOpt skip-softmax": "approximate",
    "kvpress": "approximate; for Transformers below 5.3",
}
"""What `adaattn bench` does not time, and why."""


def peers(reports: Mapping[str, Any]) -> str:
    """The table, stock's time over ours, then machines and commits, and what was not timed and why (UsageError)."""
    columns: dict[str, Mapping[str, Any]] = {}
    places, reasons = dict[str, list[str]](), dict[str, list[str]]()
    absent: Mapping[str, str] = {}
    for name, titles in SHOWN.items():
        report = reports[name]
        absent = report["absent"]  # of the last, the GPU's, where more can run
        for title in titles:
            cells = [cell for cell in report["cells"] if cell["title"] == title and cell["commit"]]
            if not cells:
                raise UsageError(f"{name}.json: {title!r} was not measured, or nobody knows at which commit")
            columns[title] = cells[0]
            places.setdefault(f"{machine(report['provenance'])}, commit {commit(cells[0])}", []).append(title)
    ways = dict.fromkeys(way for cell in columns.values() for way in (*cell["ratios"], *cell["refused"]))
    lacking = {f"`{way}`": f"not timed: {why}" for way, why in absent.items() if way not in ways}
    for way, why in (lacking | UNTIMED).items():
        reasons.setdefault(why, []).append(way)
    rows = [(f"`{way}`", *(_entry(cell, way) for cell in columns.values())) for way in ways]
    lines = table(("", *columns), rows)
    lines += [f"* {where}: {', '.join(titles)}" for where, titles in places.items()]
    return "\n".join([*lines, *(f"* {why}: {', '.join(names)}" for why, names in reasons.items())])


def _entry(cell: Mapping[str, Any], way: str) -> str:
    """How many times its time is ours, or that it refuses the cell."""
    if way in cell["ratios"]:
        return f"{cell['ratios'][way]['wall']['median']:.2f}"
    return "refuses" if way in cell["refused"] else "–"
