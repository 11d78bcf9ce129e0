"""Tables of plans for the README and docs/figures.md, and that of other implementations for docs/comparison.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from adaattn_hf.errors import UsageError

from .pages import commit, machine, percent, table
from .real_page import GAINS, cells, key_of

NAMES = {"qwen05": "Qwen2.5-Coder-0.5B", "qwen15": "Qwen2.5-Coder-1.5B", "smollm2": "SmolLM2-135M"}
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


def kept(report: Mapping[str, Any]) -> str:
    """How many calibrations found a plan and how many plans kept their budget, each commit's by itself (UsageError)."""
    lines = []
    for (model, nats, digits), own in sorted(_searched(report).items()):
        lines.append((NAMES[model], percent(nats), *_counts(own), digits))
    head = (
        "Model", "Budget", "Calibrations that found a plan", "Of these, on unseen text: measured rise within budget",
        "95 % upper bound within budget, too", "Commit",
    )  # fmt: skip
    return "\n".join(table(head, lines)[:-1])


def rates(report: Mapping[str, Any], searches: Sequence[str]) -> str:
    """The README's line on the plans of some commits of the search, over all models and budgets."""
    groups = {key: own for key, own in _searched(report).items() if key[2] in searches}
    found, inside, bound = _counts([row for own in groups.values() for row in own])
    models = " and ".join(sorted({NAMES[model] for model, _, _ in groups}))
    budgets = " or ".join(sorted({percent(nats) for _, nats, _ in groups}))
    return (
        f"* {models}, {budgets}, bfloat16, commits {' and '.join(searches)}: {found} calibrations found a plan; on "
        f"unseen text the measured rise was within budget for {inside}, its 95 % upper bound for {bound}."
    )


Rows = list[Mapping[str, Any]]


def _searched(report: Mapping[str, Any]) -> dict[tuple[str, float, str], Rows]:
    """Calibrations by model, budget and commit."""
    groups: dict[tuple[str, float, str], Rows] = {}
    for row in (row for device in report.values() for row in device["rows"] if not row["random"]):
        made = row["provenance"]
        if not made.get("commit") or not made.get("device"):
            raise UsageError(f"{row['model']}, seed {row['seed']}: the report has no commit; measure it again")
        groups.setdefault((row["model"], row["nats"], commit(made)), []).append(row)
    return groups


def _counts(rows: Rows) -> tuple[str, str, str]:
    met = [row for row in rows if row["met"]]
    inside = [sum(row["third"][of] <= row["nats"] for row in met) for of in ("delta_nll", "upper")]
    return f"{len(met)} of {len(rows)}", f"{inside[0]} of {len(met)}", f"{inside[1]} of {len(met)}"


def real(report: Mapping[str, Any]) -> str:
    """What budgets bring Qwen2.5-Coder-1.5B, at the lengths at which whole passes were timed."""
    names = "kept", "third kind, %", "inside", "bound inside", "whole pass × stock", "× exact"
    shown = {name: GAINS[name] for name in names}
    shown["measured on"] = lambda seeds, _: f"{machine(seeds[0]['provenance'])}, {commit(seeds[0]['provenance'])}"
    rows = []
    for device in report.values():
        timed = {(one["model"], one["length"]) for one in device["speed"]}
        own = [one for one in device["rows"] if not one["random"] and key_of(one)[:2] in timed]
        rows += [cell for _, *cell in cells(own, device["speed"], shown)]
    head = (
        "tokens", "budget", "calibrations that found a plan", "rise on unseen text, %", "mean within budget",
        "95 % bound within budget, too", "whole pass: speedup over sdpa", "over exact AdaAttn", "measured on, commit",
    )  # fmt: skip
    return "\n".join(table(head, rows)[:-1])


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
