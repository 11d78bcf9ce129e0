"""The sections of a study's page that a curve fills: loss against speed, per head and uniform, at equal loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..pages import loss, table


def _row(entry: dict[str, Any], name: str, lengths: Sequence[str]) -> list[str]:
    cells = [name]
    for place, length in enumerate(lengths):
        test = entry["test"][length]
        cells += [loss(entry["predicted"][place]), loss(entry["same_source"][length]), loss(test["kl"])]
        cells.append(f"{test['ratio']:.2f}")
    return cells


def _at_loss(points: Sequence[tuple[float, float]], kl: float) -> float:
    """Ratio of the best plans `(kl, ratio)` at a loss: between two of them linear in log KL, never beyond the last."""
    front: list[tuple[float, float]] = []
    for point in sorted(p for p in points if p[0] > 0.0):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    below = max((p for p in front if p[0] <= kl), default=None)
    above = min((p for p in front if p[0] > kl), default=None)
    if below is None:
        return 1.0
    if above is None:
        return below[1]
    share = math.log(kl / below[0]) / math.log(above[0] / below[0])
    return below[1] + share * (above[1] - below[1])


def _points(curve: dict[str, Any], length: str) -> list[tuple[float, float]]:
    """KL and ratio of every plan that was chosen by estimates alone."""
    plans = (entry["test"][length] for entry in curve["curve"] if entry["family"] != "direct")
    return [(test["kl"], test["ratio"]) for test in plans]


def _equal_loss(curve: dict[str, Any], lengths: Sequence[str]) -> list[list[str]]:
    """Each uniform choice beside the curve of all plans at its measured KL, per length."""
    rows = []
    for uniform in curve["uniform"]:
        cells = [uniform["choice"]]
        for length in lengths:
            test = uniform["test"][length]
            best = _at_loss(_points(curve, length), test["kl"])
            cells += [loss(test["kl"]), f"{test['ratio']:.2f}", f"{best:.2f}"]
        rows.append(cells)
    return rows


def _shift(curve: dict[str, Any], lengths: Sequence[str]) -> str:
    """How much more the same plan loses on the text that re-scales than on the held-out text."""
    parts = []
    for large in (False, True):
        mine = [e for e in curve["curve"] if e["family"] == "combined" and (e["budget"] > 2e-3) == large]
        found = [e["same_source"][n] / e["test"][n]["kl"] for e in mine for n in lengths]
        parts.append(f"{min(found):.2f} to {max(found):.2f} times (median {statistics.median(found):.2f})")
    return (
        "The same plan does not lose as much on every text: on other sequences of the calibration text the combined"
        f" plans lose {parts[0]} what they lose on the held-out text at budgets up to 2e-3, {parts[1]} above. A plan"
        " that is re-scaled on the calibration text predicts too much by this factor, beside the noise of few"
        " sequences; for a closer prediction calibrate on text of the kind that the model will see."
    )


def _direct(curve: dict[str, Any], lengths: Sequence[str]) -> list[str]:
    """What measuring the deciding pairs directly changed, beside the plans of the same budgets chosen by estimates."""
    plain = {e["budget"]: e for e in curve["curve"] if e["family"] == "combined"}
    rows = []
    for entry in (e for e in curve["curve"] if e["family"] == "direct" and e["budget"] in plain):
        base = plain[entry["budget"]]
        cells = [f"{entry['budget']:g}"]
        for place, length in enumerate(lengths):
            cells += [f"{one['predicted'][place] / one['same_source'][length]:.2f}" for one in (base, entry)]
            test = entry["test"][length]
            cells.append(f"{test['ratio'] / _at_loss(_points(curve, length), test['kl']):.3f}")
        rows.append(cells)
    if not rows:
        return []
    head = ["budget"] + [
        f"{what}, {n}"
        for n in lengths
        for what in ("predicted/measured, estimates", "predicted/measured, direct", "speed at equal loss")
    ]
    return [
        "## Measuring the pairs that decide directly",
        "",
        f"The {curve['settings']['direct']} pairs of head and choice that decide a plan got forward passes of their"
        f" own, on all {curve['settings']['sequences']} sequences per length, and the plan was chosen again. Predicted"
        " over measured KL is on other sequences of the same text, before any re-scaling; speed is that of the price"
        " table over the speed of plans chosen by estimates, at the KL on held-out text. A plan picks what was"
        f" estimated too low, which measuring takes back: at {lengths[-1]} tokens, where the budget binds, predictions"
        " come closer. Plans are not faster at equal loss, and re-scaling by the KL of the whole plan corrects the"
        " sum for less: the option that measured them, `--direct`, has left.",
        "",
        *table(head, rows),
    ]


def curve_sections(curve: dict[str, Any]) -> list[str]:
    """Returns the sections of a curve: loss against speed, uniform choices, equal loss, pairs measured directly."""
    lengths = [str(length) for length in curve["settings"]["lengths"]]
    settings = curve["settings"]
    head = ["plan"] + [
        f"{what}, {n}"
        for n in lengths
        for what in ("predicted KL", "KL, same source", "KL, held-out", "times exact")
    ]
    equal = ["choice"] + [f"{what}, {n}" for n in lengths for what in ("measured KL", "uniform", "per head")]
    return [
        "## Per head: loss against speed",
        "",
        f"One calibration ({settings['sequences']} sequences per length, {settings['rows']} rows, {settings['labels']} "
        f"labels); the budget is the sum of risks allowed per length, not re-scaled; {settings['joint']} other "
        f"sequences of the same text and {settings['held_out']} held-out sequences per length.",
        "",
        _shift(curve, lengths),
        "",
        *table(head, [_row(e, f"{e['family']}, {e['budget']:g}", lengths) for e in curve["curve"]]),
        "## Uniform: the same choice for every head",
        "",
        *table(head, [_row(e, e["choice"], lengths) for e in curve["uniform"]]),
        "## At equal loss: times as fast as exact attention",
        "",
        "Per head: between the two best plans of the nearest KL, linear in its logarithm; beyond the last, that one.",
        "",
        *table(equal, _equal_loss(curve, lengths)),
        *_direct(curve, lengths),
    ]
