"""The bounds that a user asks for, held against the upper confidence limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check(
    report: Mapping[str, Any], max_delta_nll: float | None, max_ppl_ratio: float | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """What was asked and found, and a sentence for each bound that is broken.

    Both are held against the one-sided 95 % upper bound of the tested arm's mean Δnll over documents (for
    the ratio, exp of it). A run with a single cluster proves nothing, and keeps no bound.
    """
    tested = report["quality"]["comparisons"][0]
    asked = (
        ("max_delta_nll", max_delta_nll, tested["delta_nll"]["upper"], "Δnll bound"),
        ("max_ppl_ratio", max_ppl_ratio, tested["perplexity_ratio"]["upper"], "perplexity-ratio bound"),
    )
    kept, broken = [], []
    for name, limit, found, label in asked:
        if limit is None:
            continue
        if found is None:
            good, sentence = False, "no interval: the text is one document of one window; give more text"
        else:
            good = found <= limit
            sentence = f"the one-sided 95 % {label} is {found:.9g}, {'within' if good else 'above'} it"
        kept.append({"name": name, "asked": limit, "found": found, "kept": good, "sentence": sentence})
        if not good:
            broken.append(f"{report['model']['name']} on {report['data']['name']}: {name} {limit:g}: {sentence}")
    return kept, broken
