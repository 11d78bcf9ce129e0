"""Loss, time and memory of one small model beside other libraries: tables of docs/figures.md, from kept results."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from adaattn_hf.errors import UsageError

from .budget.report import inside
from .pages import commit, loss, machine, percent, table


def frontier(reports: Mapping[str, Any]) -> str:
    """Returns the tables and the sentences around them.

    Args:
        reports: Kept results by name: `bench`, `budget`, `cache`, `cache_plans`.
    """
    study = reports["budget"]
    return "\n".join(
        [
            *_prompts(study["peers"], earlier="peers" in study.get("kept", [])),
            *_caches(reports["cache"], reports["cache_plans"]),
            *(f"* {sentence}" for sentence in [*_seeds(study["seeds"]), _flex(reports["bench"])]),
        ]
    )


def _prompts(peers: Mapping[str, Any], *, earlier: bool) -> list[str]:
    """One prefill of the same text by every library, by rising loss."""
    settings, made = peers["settings"], peers["provenance"]
    found = []
    for row in sorted((row for row in peers["rows"] if row["KL"] != ""), key=lambda row: float(row["KL"])):
        removed = re.search(r"(\d+)% of the context removed", row["what"])
        found.append((row, (row["KL"], row["seconds"], 100 - int(removed[1]) if removed else 100)))
    rows = []
    for row, costs in found:
        beaten = any(
            other != costs and all(map(operator.le, other, costs)) for _, other in found
        )  # in nothing worse, in something better
        name = row["what"] if beaten else f"**{row['what']}**"
        rows.append([name, f"{row['Δnll']:+.2e}", loss(row["KL"]), f"{row['times stock']:.2f}", f"{costs[2]} %"])
    head = (
        f"{settings['length']:,} tokens of {', '.join(settings['data'])}, the last {settings['scored']} scored",
        *("Δnll", "KL", "prefill, times stock", "keys and values kept"),
    )
    said = (
        f"{settings['model']} in {settings['dtype']}, {machine(made)}, torch {made['versions']['torch']}, commit "
        f"{commit(made)}{'; plans and times of an earlier study' * earlier}"
    )
    words = "One text, so that there is no interval. Bold: no other row is at least as good in loss, time and memory."
    return [f"A prompt ({said}). {words}", "", *table(head, rows)]


def _caches(measured: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Decode steps over every cache, and the caches that a search inside a budget found."""
    (name,) = [name for name in measured["speed"] if name.startswith("SmolLM2")]
    length = max(row["length"] for row in measured["speed"][name])
    losses = {row["cache"]: row for row in measured["loss"]}
    rows = []
    for row in measured["speed"][name]:
        if (row["batch"], row["length"]) != (1, length):
            continue
        found, times = losses.get(row["cache"]), row["wall"]
        losing = [f"{found['delta_nll']:+.2e}", f"{found['upper']:+.2e}"] if found else ["0, by definition", "–"]
        spread = f"{times['median']:.2f} ({times['quartile_25']:.2f} to {times['quartile_75']:.2f})"
        rows.append([row["cache"], *losing, spread, f"{row['bytes_per_token']:,.0f}"])
    for plan in plans:
        proof = plan["cache"]["verified"]
        rows.append([
            f"plan of the smallest cache, {percent(plan['budget'])}", f"{proof['delta_nll']:+.2e}",
            f"{proof['upper']:+.2e}", "–", f"{plan['bytes_per_token']:,.0f}",
        ])  # fmt: skip
    head = (
        "cache",
        "Δnll",
        "at most",
        f"decode behind {length:,}, times DynamicCache (quartiles)",
        "bytes per token",
    )
    made = measured["provenance"]
    said = (
        f"{name}, {machine(made)}, commit {commit(made)}; losses in float32 on other text, the bounds of plans on "
        "held-out text"
    )
    asked = {row["cache"] for row in measured["speed"][name]} | set(measured["absent"])
    lacking = sorted(asked - {row[0] for row in rows})
    absent = [f"Not timed behind so many tokens: {'; '.join(lacking)}.", ""] if lacking else []
    return [f"A cache ({said}):", "", *table(head, rows), *absent]


def _seeds(seeds: Sequence[dict[str, Any]]) -> list[str]:
    """What became of every seed of the budget study, those that failed by name."""
    said = []
    for budget in sorted({record["budget"] for record in seeds}):
        own = [record for record in seeds if record["budget"] == budget]
        broken = [str(record["seed"]) for record in own if not record["met"]]
        outside = [str(record["seed"]) for record in own if record["met"] and not inside(record)]
        verdicts = [entry["verified"] for one in own for entry in one["report"]["history"] if "verified" in entry]
        failed = sum(not verdict["passed"] for verdict in verdicts)
        said.append(
            f"{percent(budget)}, {len(own)} seeds: seeds without a plan that keeps it on the held-out texts: "
            f"{', '.join(broken) or 'none'}; plans that failed their proof on the way: {failed} of {len(verdicts)}; "
            f"seeds whose bound on a third kind of text is outside: {', '.join(outside) or 'none'}."
        )
    return said


def _flex(bench: Mapping[str, Any]) -> str:
    """What flex_attention, which is exact, takes beside sdpa."""
    title = "causal 4k (float32)"
    cells = [cell for cell in bench["cells"] if cell["title"] == title]
    if not cells or "flex_attention" not in cells[0]["ratios"]:
        raise UsageError(f"bench.json: flex_attention was not measured in the cell {title!r}")
    ours = {name: ratio["wall"]["median"] for name, ratio in cells[0]["ratios"].items()}
    return (
        f"flex_attention loses nothing: attention alone, {title}, {ours['sdpa'] / ours['flex_attention']:.2f} times as "
        f"fast as sdpa, where this package's exact attention is {ours['sdpa']:.2f} times as fast."
    )
