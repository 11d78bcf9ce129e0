"""From the sections' files to one report and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaattn_hf._files import write_atomically

from .generation import REMARK
from .measure import Cell
from .stored import steady

FACTS = (
    "cell",
    "FLOP",
    "bytes",
    "ideal ×",
    "density",
    "MiB",
    "refused",
    "failed",
    "profile",
    "quartiles",
    "auto takes",
    "built-in order",
    "note",
)
"""Entries of a row that are not times of an arm."""
BASES = ("sdpa", "sdpa, causal", "stock", "dense", "bf16, sdpa", "bf16", "as it is", "alike")
"""The arm that ratios of a row are to: the first of these that it has."""


def joined(results: Path, order: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """The report of all sections whose files lie in a directory: settings, peaks and cells by section.

    Args:
        results: The directory.
        order: Titles by section, in the order of the page.
        before: A report whose sections stay, with their setting, where none was measured anew.

    Raises:
        FileNotFoundError: No section's file is there.
    """
    found = {
        name: json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        for name in order
        if (results / f"{name}.json").is_file()
    }
    if not found:
        raise FileNotFoundError(
            f"{results}: got no file of a section, expected one of {', '.join(order)}; run `python -m studies.cuda run`"
        )
    first = next(iter(found.values()))["setting"]
    for name, cells in before.get("sections", {}).items():
        if name in order and name not in found:
            own = before.get("settings", {}).get(name, before["setting"])
            peaks = before.get("peaks", {}).get(name, {})
            seconds = before.get("seconds", {}).get(name)
            found[name] = {"setting": own, "peaks": peaks, "seconds": seconds, "cells": cells}
    found = {name: found[name] for name in order if name in found}
    return {
        "setting": first,
        "settings": {name: one["setting"] for name, one in found.items() if one["setting"] != first},
        "peaks": {name: one["peaks"] for name, one in found.items()},
        "seconds": {name: one["seconds"] for name, one in found.items()},
        "sections": {name: one["cells"] for name, one in found.items()},
    }


def write(report: Mapping[str, Any], titles: Mapping[str, str], directory: Path) -> None:
    """The report as JSON and as a page."""
    write_atomically(directory / "gpu_plans.json", json.dumps(report, indent=1) + "\n")
    write_atomically(directory / "gpu_plans.md", page(report, titles))


def page(report: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """The report in Markdown: each time with its ratio to the row's base, TFLOP/s or TB/s, and share of the peak."""
    lines = [
        "# Attention on a CUDA device",
        "",
        f"Written by `python -m studies.cuda page` from `gpu_plans.json`; do not edit. {_facts(report['setting'])}. "
        "bfloat16, 32/8 heads of 128 unless said. Microseconds of one call, medians with a cold L2, host time included "
        "where it is longer than the kernels; behind each time its ratio to the first arm, and in brackets TFLOP/s of "
        "the pairs that are visible, or TB/s of the bytes that must be read, with the share of what the device was "
        "seen to reach in the same process (a product of 8,192³, a copy of 1 GiB).",
    ]
    for name, rows in report["sections"].items():
        lines += ["", f"## {titles[name]}", ""]
        if name in report["settings"]:
            lines += [_facts(report["settings"][name]) + ".", ""]
        peaks = report["peaks"][name]
        lines += [
            *([f"Peaks: {peaks['TFLOP/s']:.0f} TFLOP/s, {peaks['TB/s']:.2f} TB/s.", ""] if peaks else []),
            *table(rows, peaks),
        ]
        lines += _remarks(rows)
        if name == "generation":
            lines += ["", REMARK]
        if name == "stored":
            lines += ["", *steady(rows)]
    return "\n".join(lines) + "\n"


def _facts(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items())


def table(rows: list[Cell], peaks: Mapping[str, float]) -> list[str]:
    """The rows of a section."""
    columns = ["cell", *(c for c in ("ideal ×", "density") if any(c in row for row in rows))]
    arms = dict.fromkeys(key for row in rows for key in row if key not in FACTS)
    columns += sorted(arms, key=lambda arm: arm not in BASES)
    columns += [c for c in ("built-in order", "auto takes", "MiB") if any(c in row for row in rows)]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += ["| " + " | ".join(_shown(row, c, peaks) for c in columns) + " |" for row in rows]
    return lines


def _shown(row: Cell, column: str, peaks: Mapping[str, float]) -> str:
    value = row.get(column)
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{key} {x:.0f}" for key, x in value.items() if x is not None) or "–"
    if isinstance(value, str):
        return value
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    if column in FACTS or column.endswith(("/s", "/token", "GiB", "×")):
        return text
    base = next((row[name] for name in BASES if isinstance(row.get(name), float)), None)
    if base is not None and base != value:
        text += f" ({base / value:.2f}×)"
    whole = column.startswith(("sdpa", "exact")) and (
        row.get("ideal ×", 1.0) != 1.0 or "density" in row or ("bytes" in row and not row["cell"].endswith(", exact"))
    )
    if whole or column == "sdpa, causal" or column.startswith("bf16, "):
        return text  # computes or reads more than the row asks for
    for amount, unit, scale in (("FLOP", "TFLOP/s", 1e-6), ("bytes", "TB/s", 1e-6)):
        if amount in row:
            rate = row[amount] / value * scale
            text += f" [{rate:.3g}, {rate / peaks[unit]:.0%}]" if unit in peaks else f" [{rate:.3g}]"
    return text


def _remarks(rows: list[Cell]) -> list[str]:
    """What was refused, failed or is noted below a table, and profiles."""
    lines: list[str] = []
    said: dict[str, list[str]] = {}
    for row in rows:
        for arm, why in row.get("refused", {}).items():
            said.setdefault(f"{arm}: {why}", []).append(row["cell"])
        for key in ("failed", "note"):
            if key in row:
                said.setdefault(str(row[key]), []).append(row["cell"])
    lines += [
        f"* {what} ({'; '.join(cells) if len(cells) < 4 else f'{len(cells)} cells'})" for what, cells in said.items()
    ]
    for row in rows:
        if "profile" in row:
            lines += [
                "",
                f"{row['cell']}, by torch's profiler:",
                "",
                "| kernel | calls | device µs | host µs |",
            ]
            lines.append("|---|---:|---:|---:|")
            lines += [
                f"| `{e['name'][:70].replace('|', ' ')}` | {e['calls']} | {e['device µs']:.0f} | {e['host µs']:.0f} |"
                for e in row["profile"][:6]
            ]
    return ["", *lines] if lines else []
