"""Tables of docs/figures.md: loss, time and memory of one small model under other libraries' methods."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .pages import commit, loss, machine, percent, table


def frontier(reports: Mapping[str, Any]) -> str:
    """Returns the tables with their captions.

    Args:
        reports: Kept results by name: `budget`, `cache`, `cache_plans`.
    """
    study = reports["budget"]
    prompts = _prompts(study["peers"], earlier="peers" in study.get("kept", []))
    return "\n".join([*prompts, *_caches(reports["cache"], reports["cache_plans"])])


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
    head = ("method", "Δnll", "KL", "prefill: speedup over stock", "keys and values kept")
    said = (
        f"A prompt of {settings['length']:,} tokens of {', '.join(settings['data'])}, the last {settings['scored']} "
        f"scored: {settings['model']} in {settings['dtype']}, {machine(made)}, torch {made['versions']['torch']}, "
        f"commit {commit(made)}"
    )
    old = " These numbers are older than the rest, plans and times included." * earlier
    words = "It is one text, so there is no interval. Bold: no other row is at least as good in KL, time and memory."
    return [f"{said}.{old} {words}", "", *table(head, rows)]


def _caches(measured: Mapping[str, Any], plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """Decode steps over every cache, and the smallest caches within a budget."""
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
            f"smallest cache within {percent(plan['budget'])}", f"{proof['delta_nll']:+.2e}",
            f"{proof['upper']:+.2e}", "–", f"{plan['bytes_per_token']:,.0f}",
        ])  # fmt: skip
    head = (
        "cache",
        "Δnll",
        "95 % upper bound",
        f"decode after {length:,} tokens: speedup over DynamicCache (quartiles)",
        "bytes per token",
    )
    made = measured["provenance"]
    said = f"A cache: {name}, {machine(made)}, commit {commit(made)}. Losses were measured in float32 on other text."
    asked = {row["cache"] for row in measured["speed"][name]} | set(measured["absent"])
    lacking = sorted(asked - {row[0] for row in rows})
    absent = [f"Not timed at this length: {'; '.join(lacking)}."] if lacking else []
    return [said, "", *table(head, rows), *absent]
