"""What a loss budget bought, as tables: `python -m studies.budget.report docs/results/budget.json` (or _cuda).

Writes the page beside the JSON; every number of it is in the JSON, or a quotient of two that are. The programs that
measured are in git: at commit 026f7a2 `studies/budget/study.py` the seeds and `speed.py` their speed, at commit 64bc833
`peers.py` other libraries. `studies.real_models` measures the same of any model.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaattn_hf._files import write_atomically

from ..pages import loss, percent, table
from .pairs import line_of

WARM_UP = "a pass of 32 tokens"
"""What came before each timed pass in records that do not say so."""
NEW_LENGTH = (
    "A length is new where no pass of it came before, but passes of others with the same plan: tables of who computes "
    "what are made while the first one waits, and the caching allocator may have to ask the device for memory. Where a "
    "model is so small that the device waits for the host's launches, as in a pass of one sequence here, the pass "
    "takes as long as these, whatever a plan saves the device."
)


def inside(record: dict[str, Any]) -> bool:
    """Whether a plan met its budget on the held-out text, and its bound keeps it on the text of another kind, too."""
    return bool(record["met"]) and elsewhere(record, "upper") <= float(record["budget"])


def elsewhere(record: dict[str, Any], name: str = "delta_nll") -> float:
    """The largest mean loss, or its bound (`upper`), over lengths on the text of another kind."""
    return float(max((one[name] for one in record.get("check", {}).values()), default=float("-inf")))


def _short(study: dict[str, Any]) -> list[str]:
    """What the seeds show, counted."""
    lengths = list(study["seeds"][0]["ratio"])
    rows, lines = [], []
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        mine = [record for record in study["seeds"] if record["budget"] == budget]
        before = [record for record in study["before"] if record["budget"] == budget]
        rows.append([percent(budget), *_counted(mine, budget, lengths)])
        rows.append([f"{percent(budget)}, earlier search", *_counted(before, budget, lengths)])
        tries = [len(verdicts_of(record)) for record in mine]
        verdicts = [verdict for record in mine for verdict in record["report"]["verdicts"]]
        gaps = [gap for record in mine for gap in _gaps(record)]
        lines.append(
            f"* {percent(budget)}: {sum(count == 1 for count in tries)} of {len(mine)} plans are the first that was"
            f" proved; the largest upper bound is {loss(max(v['upper'] for v in verdicts))} of {loss(budget)}"
            f" nats/token; predicted over measured KL {min(gaps):.2f} to {max(gaps):.2f}, median"
            f" {statistics.median(gaps):.2f}."
        )
        lines.append(line_of(mine, percent(budget)))
        lines += [
            f"    * seed {record['seed']}: inside on every held-out text; on the text of another kind it loses "
            f"{loss(elsewhere(record))}, at most {loss(elsewhere(record, 'upper'))}"
            for record in mine
            if not inside(record)
        ]
        lines.append(_needles([v for r in mine for v in (*r["report"]["verdicts"], *verdicts_of(r)[:-1])]))
    head = [
        "budget", "met, every held-out text", "other kind: mean inside, bound inside", "bound/budget, held-out text",
        "bound/budget, other kind", *(f"attention, times exact, {n}" for n in lengths),
    ]  # fmt: skip
    return ["Medians over the seeds that met their budget, in brackets the least and the most.", "",
            *table(head, rows), *lines, ""]  # fmt: skip


def verdicts_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what was proved of each plan that a seed tried, failed ones and bolder ones that failed too."""
    kinds = ("verified", "bolder")
    return [entry[kind] for entry in record["report"]["history"] for kind in kinds if kind in entry]


def _gaps(record: dict[str, Any]) -> list[float]:
    """Predicted over measured KL at each length, less what rounding adds to it where the record says so."""
    report = record["report"]
    added = [(one["predicted_kl"], one["kl"] - report.get("rounding", 0.0)) for one in report["verdicts"]]
    return [predicted / kl for predicted, kl in added if kl > 0.0]


def _counted(records: Sequence[dict[str, Any]], budget: float, lengths: Sequence[str]) -> list[str]:
    """How many of some plans keep a budget, how much of it they use, and how fast they are."""
    met = [record for record in records if record["met"]]
    other = [record for record in met if record.get("check")]
    means = sum(elsewhere(record) <= budget for record in other)
    both = f"{means}, {sum(map(inside, records))} of {len(records)}" if other else "–"
    cells = [f"{len(met)} of {len(records)}", both]
    used = [max(v["upper"] for v in record["report"]["verdicts"]) / budget for record in met]
    for shares in (used, [elsewhere(record, "upper") / budget for record in other]):
        words = (f"{value:.0%}" for value in (statistics.median(shares), min(shares), max(shares))) if shares else None
        cells.append("{} ({} to {})".format(*words) if words else "–")
    for length in lengths:
        ratios = [record["ratio"][length] for record in met if length in record["ratio"]]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "–")
    return cells


def _needles(verdicts: Sequence[dict[str, Any]]) -> str:
    """What retrieval said, over all tries that carried needles."""
    tried = [v for v in verdicts if v["retrieval_stock"] is not None]
    stock, plan = (statistics.fmean(v[name] for v in tried) for name in ("retrieval_stock", "retrieval_plan"))
    failed = [v["sentence"] for v in tried if not v["passed"]]
    return (
        f"    * needles, over all tries: stock attention finds {stock:.1%} of them, plans find {plan:.1%};"
        f" {len(failed)} verdicts failed, {sum('needles' in sentence for sentence in failed)} of them at this gate"
    )


def _made(study: dict[str, Any]) -> list[str]:
    """Where the numbers come from."""
    first = study["seeds"][0]
    settings, made = first["settings"], first["provenance"]
    return [
        f"* model: {settings['model']} in {settings['dtype']}; lengths {settings['lengths']}",
        f"* calibration text: {', '.join(settings['data'])}; held-out text: {', '.join(settings['verify_data'])}",
        "* each of the held-out texts must keep the budget by its own sequences: an upper bound is the largest of "
        "theirs",
        *(
            f"* text of another kind, on which plans are measured once they are made: "
            f"{', '.join(settings['check_data'])}, {settings['check']} sequences per length; bounds one-sided at 95 %"
            for _ in range("check_data" in settings)
        ),
        f"* losses: measured on {made['device']} (torch {made['versions']['torch']}, "
        f"transformers {made['versions']['transformers']}) at commit {_commit(made)}",
        f"* seeds: {settings['sequences']} sequences per length for risks, {settings['rows']} rows, "
        f"{settings['labels']} labels, {settings['joint']} sequences to re-scale, {settings['held_out']} to "
        f"{settings['most_held_out']} held-out sequences per length and plan",
        f"* prices: {study['prices']['machine']}; times exact = this package's own exact attention",
        "",
    ]


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
        for v in record["report"]["verdicts"]:
            cells += [loss(v["delta_nll"]), loss(v["upper"]), loss(v["kl"]), f"{v['top1']:.2%}"]
        others = [record.get("check", {}).get(n) for n in lengths]
        cells += ["" if one is None else loss(one[name]) for one in others for name in ("delta_nll", "upper")]
        rows.append(cells + [f"{record['ratio'][n]:.2f}" for n in lengths])
    head = ["budget", "seed", "met", "plans proved"]
    head += [f"{what}, {n}" for n in lengths for what in ("Δnll", "upper", "KL", "top-1")]
    head += [f"{what}, other kind, {n}" for n in lengths for what in ("Δnll", "upper")]
    return [
        "## Verified on text of another source",
        "",
        "Each seed draws its own text; the bound is one-sided, its level divided by the tries that were allowed.",
        "",
        *table(head + [f"times exact, {n}" for n in lengths], rows),
    ]


def _commit(made: dict[str, Any]) -> str:
    """The commit that measured; a copy without git does not know its own."""
    return (made.get("commit") or "not known")[:9]


def _clock(where: dict[str, Any]) -> str:
    """The machine, and what was measured there."""
    if where["device"] != "cpu":
        return f"{where['device']}; attention: the device's time of calls that come again; passes: wall time"
    return f"{where['cpu']}, {where['threads']} thread(s), CPU time"


def _speed(speed: dict[str, Any]) -> list[str]:
    lines = [
        "## Measured speed",
        "",
        f"{_clock(speed['provenance'])}; stock is Transformers' sdpa with the same weights. Before each timed pass "
        f"comes {speed['settings'].get('warm_up', WARM_UP)} of the same arm. At commit {_commit(speed['provenance'])}.",
        *(
            f"Timed later: {cell}, behind {one['settings'].get('warm_up', WARM_UP)}, on {one['provenance']['device']} "
            f"at commit {_commit(one['provenance'])}."
            for cell, one in speed.get("renewed", {}).items()
        ),
        "",
    ]
    for level, title in (("attention", "attention of all layers"), ("model", "the whole model, one prefill")):
        cells = speed[level]
        news = any("new_length" in arm for arms in cells.values() for arm in arms.values())
        ratios = ["times stock", "times our exact"]
        both = [*ratios, *(f"{one}, of a new length" for one in ratios)] if news else ratios
        rows = []
        for length, arms in cells.items():
            for name, arm in sorted(arms.items(), key=lambda item: -item[1]["seconds"]):
                seconds = arm["seconds"]
                rows.append(
                    [
                        length,
                        name,
                        f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}",
                        *_times(arms, arm, "seconds"),
                        *(_times(arms, arm, "new_length") if news else ()),
                        loss(arm["kl"]) if "kl" in arm else "",
                        f"{arm['watching'] / seconds:.2%}" if "watching" in arm else "",
                    ]
                )
        head = ["length", title, "seconds", *both, "KL on this text", "watching"]
        lines += table(head, rows)
        if news:
            lines += [NEW_LENGTH, ""]
    return lines


def _times(arms: dict[str, Any], arm: dict[str, Any], what: str) -> list[str]:
    """How many times as fast as stock and as our exact attention an arm is, where that was timed."""
    return [f"{arms[one][what] / arm[what]:.2f}" if what in arm else "" for one in ("stock sdpa", "exact")]


def _peers(peers: dict[str, Any]) -> list[str]:
    head = ["what", *sorted(name for name in peers["rows"][0] if name != "what")]
    rows = [[row[k] if isinstance(row[k], str) else f"{row[k]:.3g}" for k in head] for row in peers["rows"]]
    return ["## Beside other libraries", "", *peers["words"], "", *table(head, rows)]


def markdown(study: dict[str, Any]) -> str:
    """Returns the page of a study."""
    lines = [
        "# What a loss budget buys",
        "",
        "Generated by `studies/budget/report.py`; losses in nats/token. A record: the programs that measured it,",
        "`studies/budget/study.py` and `studies/budget/speed.py`, are in git at commit 026f7a2;",
        "`python -m studies.real_models` measures the same of any model ([larger models](real_models.md)).",
        "",
    ]
    lines += _made(study) + _short(study) + _seeds(study)
    for part, section in (("speed", _speed), ("prices", _prices), ("peers", _peers)):
        if part in study:
            found = section(study[part])
            if part in study.get("kept", ()):
                found.insert(1, "\nOf an earlier study: with its plans, its prices and its machine.")
            lines += found
    return "\n".join(lines)


def main(source: Path) -> None:
    """Writes the page of a study's JSON beside it."""
    study = json.loads(source.read_text(encoding="utf-8"))
    write_atomically(source.with_suffix(".md"), markdown(study).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
