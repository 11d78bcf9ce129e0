"""What a loss budget buys, as tables from a study: `python -m studies.budget.report DIRECTORY TARGET.json`.

Merges the files that `study`, `curve`, `speed`, `replay` and `peers` wrote into one JSON, and
writes the page beside it. Every number of the page is in the JSON, or a quotient of two that are.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaattn_hf.eval.pages import loss, percent, table, verdicts_of

from .curve_report import curve_sections

PARTS = ("prices", "curve", "speed", "replay", "peers")
WITHIN = 1.5
"""Factor that a prediction is meant to keep."""


def merge(directory: Path) -> dict[str, Any]:
    """Returns a study from its directory: `seeds/*.json` and whichever of `PARTS` is there.

    Raises:
        FileNotFoundError: If no seed was measured.
    """
    files = sorted((directory / "seeds").glob("seed-*.json"))
    if not files:
        raise FileNotFoundError(
            f"{directory / 'seeds'} has no seed-*.json; make them with python -m studies.budget.study seeds"
        )
    study: dict[str, Any] = {"seeds": [json.loads(path.read_text(encoding="utf-8")) for path in files]}
    for part in PARTS:
        path = directory / f"{part}.json"
        if path.is_file():
            study[part] = json.loads(path.read_text(encoding="utf-8"))
    return study


def _short(study: dict[str, Any]) -> list[str]:
    """What the seeds show, counted."""
    lines = []
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        mine = [record for record in study["seeds"] if record["budget"] == budget]
        met, seeds = [record for record in mine if record["met"]], len({record["seed"] for record in mine})
        tries = [len(verdicts_of(record)) for record in met]
        verdicts = [verdict for record in met for verdict in record["report"]["verdicts"]]
        gaps = [verdict["predicted_kl"] / verdict["kl"] for verdict in verdicts]
        worst = [v["predicted_kl"] / v["kl"] for v in (verdicts_of(record)[-1] for record in met)]
        ratios = ", ".join(
            f"{statistics.median(record['ratio'][n] for record in met):.2f} at {n}" for n in mine[0]["ratio"]
        )
        lines.append(
            f"* {percent(budget)}: {len(met)} of {len(mine)} plans of {seeds} seeds met the budget on text of a source"
            " that calibration never saw, "
            f"{sum(count == 1 for count in tries)} of them at the first try; the largest upper bound is "
            f"{loss(max(v['upper'] for v in verdicts))} of {loss(budget)} nats/token; predicted over measured KL"
            f" at the length that decides {min(worst):.2f} to {max(worst):.2f}, over all lengths "
            f"{min(gaps):.2f} to {max(gaps):.2f} with median {statistics.median(gaps):.2f}, "
            f"{sum(1 / WITHIN <= gap <= WITHIN for gap in gaps)} of {len(gaps)} within a factor of {WITHIN}; attention "
            f"{ratios} times as fast as exact, by the price table, in the median."
        )
        lines += [
            f"    * seed {record['seed']}: {record['sentence']}" for record in mine if not record["met"]
        ]
        lines += _needles([v for r in mine for v in (*r["report"]["verdicts"], *verdicts_of(r)[:-1])])
    return [*lines, ""]


def _needles(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """What retrieval said, over all tries that carried needles."""
    tried = [v for v in verdicts if v["retrieval_stock"] is not None]
    if not tried:
        return []
    stock, plan = (statistics.fmean(v[name] for v in tried) for name in ("retrieval_stock", "retrieval_plan"))
    failed = [v["sentence"] for v in tried if not v["passed"]]
    return [
        f"    * needles, over all tries: stock attention finds {stock:.1%} of them, plans find {plan:.1%};"
        f" {len(failed)} verdicts failed, {sum('needles' in sentence for sentence in failed)} of them at this gate"
    ]


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
        "sequences per length and try",
    ]
    if "prices" in study:
        lines.append(
            f"* prices: {study['prices']['machine']}; times exact = this package's own exact attention"
        )
        # of the table as it was written, so that studies of earlier versions keep theirs
        written = json.dumps(study["prices"], indent=1, sort_keys=True) + "\n"
        digest = hashlib.sha256(written.encode()).hexdigest()
        older = sum(record["prices"] != digest for record in study["seeds"])
        if older:
            lines.append(
                f"* {older} of {len(study['seeds'])} plans were chosen, and their speed computed, by an older table"
                " than the one below: the native kernels have learned int8 and blocks since, which plans would now take"
            )
    return [*lines, ""]


def _prices(prices: dict[str, Any]) -> list[str]:
    """Each choice's launch of one key/value head beside the exact one."""
    prefill = prices["prices"]["prefill"]
    lengths = sorted(prefill, key=int)

    def times(length: str, label: str) -> str:
        exact, mine = (sum(prefill[length][name]) for name in ("exact", label))
        return f"{exact / mine:.2f}"

    labels = sorted(prefill[lengths[0]], key=lambda label: sum(prefill[lengths[-1]][label]))
    rows = [[label, *(times(length, label) for length in lengths)] for label in labels]
    return [
        "## Prices of one key/value head: times as fast as exact",
        "",
        *table(["choice", *(f"prefill, {length}" for length in lengths)], rows),
    ]


def _seeds(study: dict[str, Any]) -> list[str]:
    lengths = [str(length) for length in study["seeds"][0]["settings"]["lengths"]]
    rows = []
    for record in study["seeds"]:
        verified = verdicts_of(record)
        cells = [
            percent(record["budget"]),
            str(record["seed"]),
            "yes" if record["met"] else "no",
            str(len(verified)),
        ]
        for verdict in record["report"]["verdicts"]:
            gap = verdict["predicted_kl"] / verdict["kl"]
            cells += [loss(verdict[name]) for name in ("delta_nll", "upper", "kl")]
            cells += [f"{gap:.2f}", f"{verdict['top1']:.2%}"]
        rows.append(cells + [f"{record['ratio'][n]:.2f}" for n in lengths])
    head = ["budget", "seed", "met", "tries"]
    head += [f"{what}, {n}" for n in lengths for what in ("Δnll", "upper", "KL", "predicted/KL", "top-1")]
    return [
        "## Verified on text of another source",
        "",
        "Each seed draws its own text; the bound is one-sided, its level divided by the tries that were allowed.",
        "",
        *table(head + [f"times exact, {n}" for n in lengths], rows),
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
                kl = loss(arm["kl"]) if "kl" in arm else ""
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
        lines += table(head, rows)
    return lines


def _replay(replay: dict[str, Any]) -> list[str]:
    here, there, length = replay["provenance"], replay["recorded_on"], str(replay["settings"]["length"])
    rows = []
    seed, wanted = (
        replay["settings"]["seed"],
        next(iter(replay["recorded"].values()))["tokens"] // (replay["settings"]["length"] - 1),
    )
    for name, verdict in replay["recorded"].items():
        sums = {key: sum(one[name][key] for one in replay["sequences"]) for key in verdict}
        mine = {key: value / sums["tokens"] for key, value in sums.items()} | {"tokens": sums["tokens"]}
        for where, one in ((f"{there['device']}, torch operations", verdict), (here["cpu"], mine)):
            cells = [loss(one["delta_nll"]), loss(one["kl"]), f"{one['top1']:.2%}", str(one["tokens"])]
            rows.append([name, length, where, *cells])
    return [
        "## The same proof through the native kernels",
        "",
        f"Plans of seed {seed} on {len(replay['sequences'])} of the {wanted} held-out sequences that verified them,"
        " through the native kernels.",
        "",
        *table(["plan", "length", "where", "Δnll", "KL", "top-1", "tokens"], rows),
    ]


def _peers(peers: dict[str, Any]) -> list[str]:
    lines = ["## Beside other libraries", "", *peers["words"], ""]
    if peers.get("rows"):
        head = ["what", *sorted(name for name in peers["rows"][0] if name != "what")]
        rows = [
            [row[k] if isinstance(row[k], str) else f"{row[k]:.3g}" for k in head] for row in peers["rows"]
        ]
        lines += table(head, rows)
    return lines


def markdown(study: dict[str, Any]) -> str:
    """Returns the page of a study; see `merge`."""
    lines = [
        "# What a loss budget buys",
        "",
        "Generated by `studies/budget/report.py`; losses in nats/token.",
        "",
    ]
    lines += _made(study) + _short(study)
    for part, section in (
        ("curve", curve_sections),
        ("speed", _speed),
        ("replay", _replay),
        ("peers", _peers),
    ):
        if part == "speed":
            lines += _seeds(study)
        if part in study:
            lines += section(study[part])
        if part == "replay" and "prices" in study:
            lines += _prices(study["prices"])
    return "\n".join(lines)


def write_page(source: Path, target: Path) -> None:
    """Writes the page of a study's JSON."""
    from adaattn_hf._files import write_atomically

    write_atomically(target, markdown(json.loads(source.read_text(encoding="utf-8"))).encode())


def main(directory: Path, target: Path) -> None:
    """Merges a study into `target` and writes the page beside it."""
    from .study import write

    write(target, merge(directory))
    write_page(target, target.with_suffix(".md"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
