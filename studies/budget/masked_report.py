"""The page of a masked-language model's budget study, written from its measured figures."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..pages import loss, percent, table

SPENT = 0.6
"""Share of a budget from which its bound counts as spent."""


def verdicts_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what was proved of each plan that a seed tried, failed ones and bolder ones that failed too."""
    kinds = ("verified", "bolder")
    return [entry[kind] for entry in record["report"]["history"] for kind in kinds if kind in entry]


def merge(directory: Path) -> dict[str, Any]:
    """Returns a study from its directory: seeds, and whichever of `prices`, `curve`, `speed` is there.

    Raises:
        FileNotFoundError: If no seed was measured.
    """
    files = sorted(directory.glob("seed-*.json"))
    if not files:
        raise FileNotFoundError(
            f"{directory} has no seed-*.json; make them with python -m studies.budget.masked seeds"
        )
    study: dict[str, Any] = {"seeds": [json.loads(path.read_text(encoding="utf-8")) for path in files]}
    for record in study["seeds"]:
        record["report"].pop("table", None)  # large, and in the plan's own report
    for part in ("prices", "curve", "speed"):
        path = directory / f"{part}.json"
        if path.is_file():
            study[part] = json.loads(path.read_text(encoding="utf-8"))
    return study


def made(study: Mapping[str, Any]) -> list[str]:
    """Returns where the numbers come from."""
    first = study["seeds"][0]
    words, where = first["settings"], first["provenance"]
    scoring = words["scoring"]
    commits = {(one["provenance"]["commit"] or "none")[:7] for one in study["seeds"]}
    return [
        f"* model: {words['model']} in {words['dtype']}; {words['lengths'][-1]} tokens",
        f"* calibration text: {', '.join(words['data'])}; held-out text: {', '.join(words['verify_data'])}",
        f"* scored: {scoring['predicts']}; {scoring['mask_share']:.0%} of a sequence's tokens per reading, "
        f"{scoring['maskings']} readings of each sequence over disjoint places; the same for both arms",
        f"* retrieval and decode: {scoring['retrieval'].removeprefix('does not apply: ')}; neither is gated or timed",
        f"* per seed: {words['sequences']} sequences for risks ({words['rows']} rows, {words['labels']} labels), "
        f"{words['joint']} to re-scale, {words['held_out']} held-out ones per try",
        f"* {where['cpu']}, {where['threads']} thread(s), torch {where['versions']['torch']}, "
        f"transformers {where['versions']['transformers']}; at commit {', '.join(sorted(commits))}",
        "",
    ]


def summary(study: Mapping[str, Any]) -> list[str]:
    """Returns what the seeds show, counted."""
    lines = []
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        mine = [record for record in study["seeds"] if record["budget"] == budget]
        met = [record for record in mine if record["met"]]
        text = f"* {percent(budget)}: {len(met)} of {len(mine)} seeds met the budget on held-out documents"
        if met:
            last = [record["report"]["verdicts"][-1] for record in met]
            gaps = [verdict["predicted_kl"] / verdict["kl"] for verdict in last]
            ratios = [value for record in met for value in record["ratio"].values()]
            used = [
                [share / budget for share in (one["upper"], max(one["upper"], one["kl"]))] for one in last
            ]
            bound, larger = (statistics.median(column) for column in zip(*used, strict=True))
            text += (
                f"; the largest upper bound is {max(one['upper'] for one in last):.2e} of {budget:.2e} nats/token, "
                f"{bound:.0%} of it in the median, the larger of bound and mean KL {larger:.0%}; "
                f"Δnll {min(one['delta_nll'] for one in last):+.1e} to {max(one['delta_nll'] for one in last):+.1e}; "
                f"predicted over measured KL {min(gaps):.2f} to {max(gaps):.2f}, median {statistics.median(gaps):.2f}; "
                f"attention {min(ratios):.2f} to {max(ratios):.2f} times as fast as exact by the price table, "
                f"median {statistics.median(ratios):.2f}"
            )
        failed = [
            verdict["sentence"] for record in mine for verdict in verdicts_of(record) if not verdict["passed"]
        ]
        if failed:
            flips = sum(sentence.startswith("failed: the likeliest token agrees") for sentence in failed)
            text += f"; {len(failed)} tries failed, {flips} of them for the agreement of the likeliest tokens alone"
        lines.append(text + ".")
    return [*lines, ""]


def verified(study: Mapping[str, Any]) -> list[str]:
    """Returns the table of verdicts, failed tries too."""
    rows = []
    for record in sorted(study["seeds"], key=lambda one: (one["budget"], one["seed"])):
        tries = verdicts_of(record)
        kept = [one for one in tries if one["passed"]][-1:]
        for number, one in enumerate(tries, 1):
            gap = one["predicted_kl"] / one["kl"] if one["kl"] else math.nan
            rows.append(
                [
                    percent(record["budget"]),
                    str(record["seed"]),
                    str(number),
                    "yes" if one["passed"] else "no",
                ]
                + [loss(one[name]) for name in ("delta_nll", "upper", "kl")]
                + [f"{gap:.2f}", f"{one['top1']:.2%}", str(one["tokens"]), str(one["documents"])]
                + [f"{value:.2f}" if one in kept else "" for value in record["ratio"].values()]
            )
        if not tries:
            rows.append([percent(record["budget"]), str(record["seed"]), "0", "no", *[""] * 8])
    head = [
        "budget",
        "seed",
        "try",
        "passed",
        "Δnll",
        "upper",
        "KL",
        "predicted/KL",
        "top-1",
        "tokens",
        "clusters",
    ]
    return [
        "## Verified",
        "",
        "Each seed draws its own text, labels and maskings; the bound is one-sided, over documents, its level divided "
        "by the tries that were allowed.",
        "",
        *table([*head, "times exact"], rows),
    ]


def curve(study: Mapping[str, Any]) -> list[str]:
    """Returns plans of rising budgets beside uniform choices, and where their loss begins to rise."""
    plans = sorted(study["curve"]["plans"], key=lambda one: float(one["kl"]))
    rows = [
        [
            one["plan"],
            *(loss(one[name]) for name in ("predicted", "kl", "delta_nll", "upper")),
            f"{one['top1']:.2%}",
            f"{one['ratio']:.2f}",
        ]
        for one in [*study["curve"]["plans"], *study["curve"]["uniform"]]
    ]
    lines = []
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        inside = [one for one in plans if one["kl"] <= budget]
        spent = [one for one in plans if one["upper"] >= SPENT * budget]
        if inside:
            lines.append(
                f"* {percent(budget)}: of the plans whose mean KL keeps the budget, the largest has a KL of "
                f"{loss(inside[-1]['kl'])} and a Δnll of {inside[-1]['delta_nll']:+.1e}, at most "
                f"{inside[-1]['upper']:+.1e}: {inside[-1]['upper'] / budget:.0%} of the budget. "
                + (
                    f"{SPENT:.0%} are reached by a KL of {loss(spent[0]['kl'])}, where {1 - spent[0]['top1']:.1%} of "
                    f"the likeliest tokens change and attention is {spent[0]['ratio']:.2f} times as fast as exact "
                    f"instead of {inside[-1]['ratio']:.2f}."
                    if spent
                    else f"No plan measured reaches {SPENT:.0%}."
                )
            )
    return [
        "## Loss against speed",
        "",
        "One calibration; a budget is the sum of risks allowed, not re-scaled. Bounds are one-sided at 95 %. Below the "
        "plans, the same choice for every head.",
        "",
        "The mean KL must keep a budget as well as the bound of the loss. So far the bound is spent within that limit:",
        "",
        *lines,
        "",
        *table(["plan", "predicted KL", "measured KL", "Δnll", "at most", "top-1", "times exact"], rows),
    ]


def speed(study: Mapping[str, Any]) -> list[str]:
    """Returns measured times of the first seed's plans."""
    found = study["speed"]
    rows = []
    for name, attention in found["attention"].items():
        whole = found["model"][name]
        cells = [f"{attention * 1e3:.1f}"]
        cells += [f"{found['attention'][base] / attention:.2f}" for base in ("stock sdpa", "exact")]
        cells += [f"{whole * 1e3:.1f}"]
        cells += [f"{found['model'][base] / whole:.2f}" for base in ("stock sdpa", "exact")]
        rows.append([name, *cells])
    where = found["provenance"]
    return [
        "## Measured speed",
        "",
        f"{found['batch']} sequences of {found['length']} tokens at once; {where['cpu']}, {where['threads']} "
        "thread(s), CPU time, the smallest of interleaved rounds; stock is Transformers' sdpa with the same weights.",
        "",
        *table(
            [
                "arm",
                "attention, ms",
                "times stock",
                "times exact",
                "whole model, ms",
                "times stock",
                "times exact",
            ],
            rows,
        ),
    ]


def markdown(study: Mapping[str, Any]) -> str:
    """Returns the page of a study; see `merge`."""
    lines = [
        "# What a loss budget buys on a masked-language model",
        "",
        "Generated by `studies/budget/masked.py`; losses in nats per masked token.",
        "",
        *made(study),
        *summary(study),
        *verified(study),
    ]
    for part, section in (("curve", curve), ("speed", speed)):
        if part in study:
            lines += section(study)
    return "\n".join(lines)
