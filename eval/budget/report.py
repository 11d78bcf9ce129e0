"""What a loss budget buys, as tables from a study: `python -m adaattn_hf.eval.budget.report DIRECTORY TARGET.json`.

Merges the files that `study`, `curve`, `speed` and `peers` wrote into one JSON, and
writes the page beside it. Every number of the page is in the JSON, or a quotient of two that are.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaattn_hf.policy.prices import PriceTable

PARTS = ("prices", "curve", "speed", "peers")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _loss(value: float) -> str:
    return f"{value:.2e}"


def merge(directory: Path) -> dict[str, Any]:
    """Returns a study from its directory: `seeds/*.json` and whichever of `prices`, `curve`, `speed`, `peers` is there.

    Raises:
        FileNotFoundError: If no seed was measured.
    """
    files = sorted((directory / "seeds").glob("seed-*.json"))
    if not files:
        raise FileNotFoundError(
            f"{directory / 'seeds'} has no seed-*.json; make them with python -m adaattn_hf.eval.budget.study seeds"
        )
    study: dict[str, Any] = {"seeds": [json.loads(path.read_text(encoding="utf-8")) for path in files]}
    for part in PARTS:
        path = directory / f"{part}.json"
        if path.is_file():
            study[part] = json.loads(path.read_text(encoding="utf-8"))
    return study


def _verified(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry["verified"] for entry in record["report"]["history"] if "verified" in entry]


def _percent(budget: float) -> str:
    return f"{100 * math.expm1(budget):.3g} %"


def _short(study: dict[str, Any]) -> list[str]:
    """What the seeds show, counted."""
    lines = []
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        mine = [record for record in study["seeds"] if record["budget"] == budget]
        met, seeds = [record for record in mine if record["met"]], len({record["seed"] for record in mine})
        tries = [len(_verified(record)) for record in met]
        verdicts = [verdict for record in met for verdict in record["report"]["verdicts"]]
        gaps = [verdict["predicted_kl"] / verdict["kl"] for verdict in verdicts]
        worst = [v["predicted_kl"] / v["kl"] for v in (_verified(record)[-1] for record in met)]
        ratios = ", ".join(
            f"{statistics.median(record['ratio'][n] for record in met):.2f} at {n}" for n in mine[0]["ratio"]
        )
        lines.append(
            f"* {_percent(budget)}: {len(met)} of {len(mine)} plans of {seeds} seeds met the budget on text of a source"
            " that calibration never saw, "
            f"{sum(count == 1 for count in tries)} of them at the first try; the largest upper bound is "
            f"{_loss(max(v['upper'] for v in verdicts))} of {_loss(budget)} nats/token; predicted over measured KL"
            f" at the length that decides {min(worst):.2f} to {max(worst):.2f}, over all lengths "
            f"{min(gaps):.2f} to {max(gaps):.2f} with median {statistics.median(gaps):.2f}; attention "
            f"{ratios} times as fast as exact, by the price table, in the median."
        )
    return [*lines, ""]


def _made(study: dict[str, Any]) -> list[str]:
    """Where the numbers come from."""
    first = study["seeds"][0]
    settings, made = first["settings"], first["provenance"]
    lines = [
        f"* model: {settings['model']} in {settings['dtype']}; lengths {settings['lengths']}",
        f"* calibration text: {', '.join(settings['data'])}; held-out text: {', '.join(settings['verify_data'])}",
        f"* losses: measured on {made['device']} (torch {made['versions']['torch']}, "
        f"transformers {made['versions']['transformers']})",
        f"* seeds: {settings['sequences']} sequences per length for risks, {settings['rows']} rows, "
        f"{settings['labels']} labels, {settings['joint']} sequences to re-scale, {settings['held_out']} held-out "
        f"sequences per length and try; {statistics.median(sum(r['seconds'].values()) for r in study['seeds']):.0f} "
        "seconds per seed in the median",
    ]
    if "prices" in study:
        lines.append(
            f"* prices: {study['prices']['machine']}; times exact = this package's own exact attention"
        )
        digest = PriceTable.from_json(json.dumps(study["prices"])).digest
        older = sum(record["prices"] != digest for record in study["seeds"])
        if older:
            lines.append(
                f"* {older} of {len(study['seeds'])} plans were chosen, and their speed computed, by an older table"
                " than the one below: the native kernels have learned int8 and blocks since, which plans would now take"
            )
    return [*lines, ""]


def _prices(table: dict[str, Any]) -> list[str]:
    """Each choice's launch of one key/value head beside the exact one."""
    prefill = table["prices"]["prefill"]
    lengths = sorted(prefill, key=int)

    def times(length: str, label: str) -> str:
        exact, mine = (sum(prefill[length][name]) for name in ("exact", label))
        return f"{exact / mine:.2f}"

    labels = sorted(prefill[lengths[0]], key=lambda label: sum(prefill[lengths[-1]][label]))
    rows = [[label, *(times(length, label) for length in lengths)] for label in labels]
    return [
        "## Prices of one key/value head: times as fast as exact",
        "",
        *_table(["choice", *(f"prefill, {length}" for length in lengths)], rows),
    ]


def _row(entry: dict[str, Any], name: str, lengths: Sequence[str]) -> list[str]:
    cells = [name]
    for place, length in enumerate(lengths):
        test = entry["test"][length]
        cells += [_loss(entry["predicted"][place]), _loss(test["kl"]), f"{test['ratio']:.2f}"]
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


def _equal_loss(curve: dict[str, Any], lengths: Sequence[str]) -> list[list[str]]:
    """Each uniform choice beside the curve of all plans at its measured KL, per length."""
    rows = []
    for uniform in curve["uniform"]:
        cells = [uniform["choice"]]
        for length in lengths:
            test = uniform["test"][length]
            points = [(e["test"][length]["kl"], e["test"][length]["ratio"]) for e in curve["curve"]]
            best = _at_loss(points, test["kl"])
            cells += [_loss(test["kl"]), f"{test['ratio']:.2f}", f"{best:.2f}"]
        rows.append(cells)
    return rows


def _curve(curve: dict[str, Any]) -> list[str]:
    lengths = [str(length) for length in curve["settings"]["lengths"]]
    settings = curve["settings"]
    head = ["plan"] + [
        f"{what}, {n}" for n in lengths for what in ("predicted KL", "measured KL", "times exact")
    ]
    equal = ["choice"] + [f"{what}, {n}" for n in lengths for what in ("measured KL", "uniform", "per head")]
    return [
        "## Per head: loss against speed",
        "",
        f"One calibration ({settings['sequences']} sequences per length, {settings['rows']} rows, {settings['labels']} "
        f"labels); the budget is the sum of risks allowed per length, not re-scaled; {settings['held_out']} held-out "
        "sequences per length.",
        "",
        *_table(head, [_row(e, f"{e['family']}, {e['budget']:g}", lengths) for e in curve["curve"]]),
        "## Uniform: the same choice for every head",
        "",
        *_table(head, [_row(e, e["choice"], lengths) for e in curve["uniform"]]),
        "## At equal loss: times as fast as exact attention",
        "",
        "Per head: between the two best plans of the nearest KL, linear in its logarithm; beyond the last, that one.",
        "",
        *_table(equal, _equal_loss(curve, lengths)),
    ]


def _seeds(study: dict[str, Any]) -> list[str]:
    lengths = [str(length) for length in study["seeds"][0]["settings"]["lengths"]]
    rows = []
    for record in study["seeds"]:
        verified = _verified(record)
        cells = [
            _percent(record["budget"]),
            str(record["seed"]),
            "yes" if record["met"] else "no",
            str(len(verified)),
        ]
        for verdict in record["report"]["verdicts"]:
            gap = verdict["predicted_kl"] / verdict["kl"]
            cells += [_loss(verdict[name]) for name in ("delta_nll", "upper", "kl")]
            cells += [f"{gap:.2f}", f"{verdict['top1']:.2%}"]
        rows.append(cells + [f"{record['ratio'][n]:.2f}" for n in lengths])
    head = ["budget", "seed", "met", "tries"]
    head += [f"{what}, {n}" for n in lengths for what in ("Δnll", "upper", "KL", "predicted/KL", "top-1")]
    return [
        "## Verified on text of another source",
        "",
        "Each seed draws its own text; the bound is one-sided, its level divided by the tries that were allowed.",
        "",
        *_table(head + [f"times exact, {n}" for n in lengths], rows),
    ]


def _speed(speed: dict[str, Any]) -> list[str]:
    lines = [
        "## Measured speed",
        "",
        f"{speed['provenance']['cpu']}, {speed['provenance']['threads']} thread(s), CPU time; stock is Transformers' "
        "sdpa with the same weights.",
        "",
    ]
    for level, title in (("attention", "attention of all layers"), ("model", "the whole model, one prefill")):
        rows = []
        for length, arms in speed.get(level, {}).items():
            stock, exact = arms["stock sdpa"]["seconds"], arms["exact"]["seconds"]
            for name, arm in sorted(arms.items(), key=lambda item: -item[1]["seconds"]):
                kl = _loss(arm["kl"]) if "kl" in arm else ""
                seconds = arm["seconds"]
                watching = f"{arm['watching'] / seconds:.2%}" if "watching" in arm else ""
                cells = [
                    length,
                    name,
                    f"{seconds:.2f}",
                    f"{stock / seconds:.2f}",
                    f"{exact / seconds:.2f}",
                    kl,
                ]
                rows.append([*cells, watching])
        head = ["length", title, "seconds", "times stock", "times our exact", "KL on this text", "watching"]
        lines += _table(head, rows)
    return lines


def _peers(peers: dict[str, Any]) -> list[str]:
    lines = ["## Beside other libraries", "", *peers["words"], ""]
    if peers.get("rows"):
        head = ["what", *sorted(name for name in peers["rows"][0] if name != "what")]
        rows = [
            [row[k] if isinstance(row[k], str) else f"{row[k]:.3g}" for k in head] for row in peers["rows"]
        ]
        lines += _table(head, rows)
    return lines


def markdown(study: dict[str, Any]) -> str:
    """Returns the page of a study; see `merge`."""
    lines = [
        "# What a loss budget buys",
        "",
        "Generated by `eval/budget/report.py`; losses in nats/token.",
        "",
    ]
    lines += _made(study) + _short(study)
    for part, section in (("curve", _curve), ("speed", _speed), ("peers", _peers)):
        if part == "speed":
            lines += _seeds(study)
        if part in study:
            lines += section(study[part])
        if part == "speed" and "prices" in study:
            lines += _prices(study["prices"])
    return "\n".join(lines)


def write_page(source: Path, target: Path) -> None:
    """Writes the page of a study's JSON."""
    from adaattn_hf.files import write_atomically

    write_atomically(target, markdown(json.loads(source.read_text(encoding="utf-8"))).encode())


def main(directory: Path, target: Path) -> None:
    """Merges a study into `target` and writes the page beside it."""
    from adaattn_hf.eval.budget.study import write

    write(target, merge(directory))
    write_page(target, target.with_suffix(".md"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
