"""From the sections' files to one report and its page."""

import json
import statistics
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from adaattn_hf._files import write_atomically

from ..pages import table
from .measure import Cell

FACTS = (
    "cell", "FLOP", "bytes", "ideal ×", "refused", "failed", "quartiles", "auto takes", "first pass, s",
    "largest", "difference", "note",
)  # fmt: skip
"""Entries of a row that are not times of an arm."""
BASES = ("sdpa", "sdpa, causal", "stock", "dense", "bf16, sdpa", "bf16")
"""The arm that ratios of a row are to: the first of these that it has."""
OURS = ("auto", "exact", "adaattn", "codes")
"""The arm that a section is summed up by."""
SHOWN = {
    "cell": "call", "auto": "adaattn", "exact, auto": "adaattn, no plan", "captured": "triton, captured",
    "by our sdpa": "adaattn_sdpa", "by our triton": "adaattn_triton", "auto takes": "backend",
}  # fmt: skip
"""Columns under other names than those of the report."""
HEAD = """
* Times are microseconds of one call, unless the call names another unit: medians, with a cold L2 cache. Where the host
  takes longer than the kernels, it is the host's time; columns of such short calls differ by chance.
* In parentheses: how many times as fast as the first column. In square brackets: TFLOP/s of the visible pairs, or TB/s
  of the bytes that must be read, and the share of what the device reached in the same process (a product of 8192³, a
  copy of 1 GiB).
* `sdpa` is Transformers' stock attention, `cudnn` and `flash` are torch's kernels by name, `fa3_fwd` and `fa4` are
  flash-attn 3 (without backward) and 4, `triton` is this package's kernel. `adaattn` chooses one: `backend`.
* Windows per head and a quantised cache approximate; everything else is exact.
* "captured": replayed as a CUDA graph, without the host. bfloat16, 32 query heads and 8 key/value heads of 128, unless
  the call says otherwise (32/8 × 128).
"""
SAYS = {
    "structures": "`sdpa` gets a dense mask.",
    "prefill": "Windows of the eight key/value heads under a plan; `1024+16` is a window of 1,024 keys and 16 sinks. "
    "ideal ×: pairs of exact attention divided by pairs that the plan reads.",
    "decode": "Windows and ideal × as above, of bytes.",
    "growing": "A record: `growing` of `studies/cuda/kernels.py` at commit 4f43395. "
    "Mean time of a step over 32 steps, host included; no step has met its number of keys. For each new number, "
    "torch's `sdpa` prepares a kernel anew, which takes nearly all of its time. `DynamicCache` has a new number at "
    "every token.",
    "training": "`sdpa` computes all of causal attention in every row.",
    "packed": "A record: `studies/cuda/packed.py` at commit 4f43395. "
    "`dense`: calls of the same pairs without padding, by their fastest kernel. BERT-base of so few tokens waits for "
    "the host, with padding and without (`prepared`).",
    "stored": "A record: `studies/cuda/stored.py` at commit 4f43395. "
    "`codes` reads keys in 8 bits and values in 8 (`int8`) or 4 (`k8v4`). Short calls wait for the host unless they "
    "are captured.",
    "eight": "A record: `studies/cuda/eight.py` at commit 66077c1. A tile is (queries, keys, warps, stages).",
    "light": "A record: `studies/cuda/light.py` at commit 4f43395. "
    "The backend follows from rounded sizes; in some calls the other one would be faster.",
    "generation": "A record: `studies/cuda/generation.py` at commit 21017b1. "
    "With `DynamicCache`, torch prepares a kernel for each number of keys; those of the second row had "
    "been met in the first. Weights are random; how many pairs the plans read is below the last table.",
    "compiled": "A record: `studies/cuda/compiled.py` at commit 4f43395. "
    "In a traced graph `adaattn`, too, computes a prefill under a dense mask, so that padding and windows save nothing "
    "there ([torch.compile](../guides/compile.md)).",
    "model": "A record: `studies/cuda/model.py` at commit 21017b1. "
    "The decode steps are not captured: they wait for the host and differ by chance. Captured ones are "
    "[above](#generation-with-a-static-cache).",
}
"""What a reader needs to know of a section's table."""


def joined(results: Path, order: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """The report of the sections whose files lie in a directory (FileNotFoundError), of others what `before` says."""
    files = {name: results / f"{name}.json" for name in order}
    found = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
    if not found:
        raise FileNotFoundError(
            f"{results}: got no file of a section, expected one of {', '.join(order)}; run `python -m studies.cuda run`"
        )
    first = next(iter(found.values()))["setting"]
    for name, cells in before.get("sections", {}).items():
        if name in order and name not in found:
            own = before.get("settings", {}).get(name, before["setting"])
            peaks, seconds = (before.get(part, {}).get(name) for part in ("peaks", "seconds"))
            found[name] = {"setting": own, "peaks": peaks or {}, "seconds": seconds, "cells": cells}
    found = {name: found[name] for name in order if name in found}
    own = {name: one["setting"] for name, one in found.items() if one["setting"] != first}
    parts = {"peaks": "peaks", "seconds": "seconds", "sections": "cells"}
    return {
        "setting": first, "settings": own,
        **{part: {name: one[key] for name, one in found.items()} for part, key in parts.items()},
    }  # fmt: skip


def write(report: Mapping[str, Any], titles: Mapping[str, str], directory: Path) -> None:
    """The report as JSON and as a page."""
    write_atomically(directory / "gpu_plans.json", json.dumps(report, indent=1) + "\n")
    write_atomically(directory / "gpu_plans.md", page(report, titles))


def page(report: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """The report in Markdown: each time with its ratio to the row's base, TFLOP/s or TB/s, and share of the peak."""
    first = report["setting"]
    settings = {name: report["settings"].get(name, first) for name in report["sections"]}
    names = {str(one.get("device", "")).removeprefix("NVIDIA ").partition(" ")[0] for one in settings.values()}
    lines = [f"# Attention on {' and '.join(sorted(names))}", "", *_summary(report, titles), HEAD.strip()]
    lines += [f"* Versions, unless a section names others: {_facts(first)}.", ""]
    lines += ["Written by `python -m studies.cuda page` from `gpu_plans.json`; do not edit."]
    for name, rows in report["sections"].items():
        own, peaks = settings[name], report["peaks"][name]
        where = [f"{own.get('device', '')}, commit {own['commit'][:9]}"]
        where += [f"peaks {peaks['TFLOP/s']:.0f} TFLOP/s, {peaks['TB/s']:.2f} TB/s"] if peaks else []
        others = _facts({key: value for key, value in own.items() if first.get(key) != value})
        lines += ["", f"## {titles[name]}", "", "; ".join([*where, others] if others else where) + ".", ""]
        lines += [SAYS[name], ""] if name in SAYS else []
        for _, group in groupby(rows, lambda row: (_base(row) or "dense") == "stock"):
            lines += _table(list(group), peaks)
        lines += _remarks(rows)
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _summary(report: Mapping[str, Any], titles: Mapping[str, str]) -> list[str]:
    """How many times as fast ours is as what it is compared with: a row for each section that is no record."""
    body = []
    for name, rows in report["sections"].items():
        pairs = [(_base(row), next((arm for arm in OURS if isinstance(row.get(arm), float)), None)) for row in rows]
        times = [row[base] / row[ours] for row, (base, ours) in zip(rows, pairs, strict=True) if base and ours]
        if times and not titles[name].endswith("(record)"):
            bases = ", ".join(dict.fromkeys(f"`{base}`" for base, ours in pairs if base and ours))
            middle = statistics.median(times)
            slower = f"{sum(each < 1 for each in times)} of {len(times)}"
            body.append([titles[name], bases, *(f"{each:.2f}" for each in (min(times), middle, max(times))), slower])
    said = "Times as fast as what it is compared with; sections are of several commits and cards, which each one names."
    head = ["section", "compared with", "least", "median", "most", "slower calls"]
    return [said, "", *table(head, body)] if body else []


def _base(row: Cell) -> str | None:
    return next((name for name in BASES if isinstance(row.get(name), float)), None)


def _facts(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items() if key not in ("commit", "device"))


def _table(rows: list[Cell], peaks: Mapping[str, float]) -> list[str]:
    """Rows of a section that have a base in common; columns in which something was measured."""
    columns = ["cell", *(["ideal ×"] if "ideal ×" in rows[0] else [])]
    arms = dict.fromkeys(key for row in rows for key, value in row.items() if key not in FACTS and value is not None)
    columns += sorted(arms, key=lambda arm: arm not in BASES)
    columns += [c for c in ("auto takes", "first pass, s") if any(c in row for row in rows)]
    lines = table([SHOWN.get(c, c) for c in columns], [[_shown(row, c, peaks) for c in columns] for row in rows])
    return [lines[0], "|---|" + "---:|" * (len(columns) - 1), *lines[2:]]


def _shown(row: Cell, column: str, peaks: Mapping[str, float]) -> str:
    value = row.get(column)
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{key} {x:.0f}" for key, x in value.items() if x is not None) or "–"
    if isinstance(value, str):
        return value.replace(" behind ", " after ")
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    if column in FACTS or column.endswith("×"):
        return text
    base = _base(row)
    if base is not None and row[base] != value:
        text += f" ({row[base] / value:.2f}×)"
    whole = column.startswith(("sdpa", "exact")) and (
        row.get("ideal ×", 1.0) != 1.0 or ("bytes" in row and not row["cell"].endswith(", exact"))
    )
    if whole or column == "sdpa, causal" or column.startswith("bf16, "):
        return text  # computes or reads more than the row asks for
    for amount, unit in (("FLOP", "TFLOP/s"), ("bytes", "TB/s")):
        if amount in row:
            rate = row[amount] / value * 1e-6
            share = rate / peaks[unit] if unit in peaks else None
            if share is None or share >= 0.005:  # a rate next to nothing says that another one bounds the call
                text += f" [{rate:.3g}]" if share is None else f" [{rate:.3g}, {share:.0%}]"
    return text


def _remarks(rows: list[Cell]) -> list[str]:
    """What was refused, failed or is noted below a table, but for packages that are not installed."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for arm, why in row.get("refused", {}).items():
            if "not installed" not in why:
                said.setdefault(f"{arm}: {why}", []).append(row["cell"])
        for key in ("failed", "note"):
            if key in row:
                said.setdefault(str(row[key]), []).append(row["cell"])
    where = {what: "; ".join(cells) if len(cells) < 3 else f"{len(cells)} calls" for what, cells in said.items()}
    return [f"* {what} ({calls})" for what, calls in where.items()]
