"""Plans in the README and docs/figures.md: how many calibrations found one, which kept their budget, what they gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from adaattn_hf.errors import UsageError

from .pages import commit, machine, percent, table
from .real_page import GAINS, cells, key_of

NAMES = {"qwen05": "Qwen2.5-Coder-0.5B", "qwen15": "Qwen2.5-Coder-1.5B", "smollm2": "SmolLM2-135M"}


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
