"""What a loss budget buys, as tables: `python -m studies.budget.report DIRECTORY TARGET.json [BEFORE.json]`.

Merges the files that `study` and `speed` wrote into one JSON, and writes the page beside it. Every number of the page
is in the JSON, or a quotient of two that are. The plans of an earlier study are set beside those of this one, at the
prices of this one; other libraries were measured in an earlier study alone, by `studies/budget/peers.py`, which is in
git at commit 64bc833.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adaattn_hf.policy.knapsack import of_units, shared_prices
from adaattn_hf.policy.prices import PriceTable

from ..pages import loss, percent, table
from .pairs import lines_of

PARTS = ("prices", "speed")
KEPT = ("curve", "speed", "peers")
"""Parts that are kept from an earlier study where this one has none."""
WARM_UP = "a pass of 32 tokens"
"""What came before each timed pass in records that do not say so."""
NEW_LENGTH = (
    "A length is new where no pass of it came before, but passes of others with the same plan: tables of who computes "
    "what are made while the first one waits, and the caching allocator may have to ask the device for memory. Where a "
    "model is so small that the device waits for the host's launches, as in a pass of one sequence here, the pass "
    "takes as long as these, whatever a plan saves the device."
)


def merge(directory: Path, before: Path | None = None) -> dict[str, Any]:
    """Returns a study from its directory: `seeds/*.json` and whichever of `PARTS` is there.

    Args:
        directory: The directory.
        before: JSON of an earlier study.

    Raises:
        FileNotFoundError: If no seed was measured.
    """
    files = sorted((directory / "seeds").glob("seed-*.json"))
    if not files:
        raise FileNotFoundError(
            f"{directory / 'seeds'} has no seed-*.json; make them with python -m studies.budget.study seeds"
        )
    study: dict[str, Any] = {"seeds": [json.loads(path.read_text(encoding="utf-8")) for path in files]}
    for record in study["seeds"]:
        record["report"].pop("table", None)  # large, and in the plan's own report
    for part in PARTS:
        path = directory / f"{part}.json"
        if path.is_file():
            study[part] = json.loads(path.read_text(encoding="utf-8"))
    if before is not None:
        old = json.loads(before.read_text(encoding="utf-8"))
        study["before"] = _before(old, study)
        study["kept"] = [part for part in KEPT if part in old and part not in study]
        study |= {part: old[part] for part in study["kept"]}
    return study


def _before(old: dict[str, Any], study: dict[str, Any]) -> list[dict[str, Any]]:
    """The plans of an earlier study with what is set beside this one's; their speed by this one's prices."""
    table = PriceTable.from_json(json.dumps(study["prices"])) if "prices" in study else None
    heads = study["seeds"][0]["kv_heads"]
    return [
        {
            "budget": one["budget"],
            "met": one["met"],
            "report": {"verdicts": [{"upper": verdict["upper"]} for verdict in one["report"]["verdicts"]]},
            "ratio": {
                n: value if table is None else times_exact(one["picks"], heads, table, int(n))
                for n, value in one["ratio"].items()
            },
        }
        for one in old["seeds"]
    ]


def times_exact(picks: Sequence[str], heads: int, table: PriceTable, length: int) -> float:
    """Returns how many times faster than exact attention the launches of a plan are, by a price table.

    Args:
        picks: Label of each unit's choice, layers rising.
        heads: Key/value heads of a layer.
        table: The prices.
        length: Tokens of the prefill.
    """

    choices = list(dict.fromkeys(["exact", *picks]))
    layers, names = [unit // heads for unit in range(len(picks))], [table.launch(name) for name in choices]
    prices, launches = of_units(table, {("prefill", length): 1.0}, [choices] * len(picks), names, layers)
    mine = np.array([choices.index(name) for name in picks])
    exact, own = (float(shared_prices(one, prices, launches).sum()) for one in (np.zeros_like(mine), mine))
    return exact / own


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
        for name, records in (("", study["seeds"]), (", earlier search", study.get("before", []))):
            mine = [record for record in records if record["budget"] == budget]
            if mine:
                rows.append([percent(budget) + name, *_counted(mine, budget, lengths)])
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        mine = [record for record in study["seeds"] if record["budget"] == budget]
        met = [record for record in mine if record["met"]]
        tries = [len(verdicts_of(record)) for record in met]
        verdicts = [verdict for record in met for verdict in record["report"]["verdicts"]]
        gaps = [gap for record in met for gap in _gaps(record)]
        half = met and mine[0]["settings"]["dtype"] != "float32" and "rounding" not in met[0]["report"]
        if met:
            predicted = (
                f"; predicted over measured KL{', which holds that of rounding,' if half else ''} {min(gaps):.2f} to"
                f" {max(gaps):.2f}, median {statistics.median(gaps):.2f}"
                if gaps
                else ""
            )
            lines.append(
                f"* {percent(budget)}: {sum(count == 1 for count in tries)} of {len(met)} plans are the first that was"
                f" proved; the largest upper bound is {loss(max(v['upper'] for v in verdicts))} of {loss(budget)}"
                f" nats/token{predicted}."
            )
            lines += lines_of(met, percent(budget))
        unmet = Counter(record["sentence"] for record in mine if not record["met"])
        lines += [f"* {percent(budget)}: {count} of {len(mine)} seeds: {words}" for words, count in unmet.items()]
        lines += [
            f"    * seed {record['seed']}: inside on every held-out text; on the text of another kind it loses "
            f"{loss(elsewhere(record))}, at most {loss(elsewhere(record, 'upper'))}"
            for record in met
            if not inside(record)
        ]
        lines += _needles([v for r in mine for v in (*r["report"]["verdicts"], *verdicts_of(r)[:-1])])
    head = ["budget", "met, every held-out text", "other kind: mean inside, bound inside"]
    head += ["bound/budget, held-out text"]
    head += ["bound/budget, other kind", *(f"attention, times exact, {n}" for n in lengths)]
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
        *(
            "* each of the held-out texts must keep the budget by its own sequences: an upper bound is the largest"
            " of theirs"
            for _ in range(len(settings["verify_data"]) > 1)
        ),
        *(
            f"* text of another kind, on which plans are measured once they are made: "
            f"{', '.join(settings['check_data'])}, {settings['check']} sequences per length; bounds one-sided at 95 %"
            for _ in range("check_data" in settings)
        ),
        f"* losses: measured on {made['device']} (torch {made['versions']['torch']}, "
        f"transformers {made['versions']['transformers']}) at commit {_commit(made)}",
        f"* seeds: {settings['sequences']} sequences per length for risks, {settings['rows']} rows, "
        f"{settings['labels']} labels, {settings['joint']} sequences to re-scale, {settings['held_out']} to "
        f"{settings.get('most_held_out', settings['held_out'])} held-out sequences per length and plan",
    ]
    if "prices" in study:
        lines.append(f"* prices: {study['prices']['machine']}; times exact = this package's own exact attention")
        timed = study.get("speed", {}).get("provenance", made)
        if timed["device"] != "cpu" and _commit(timed) != _commit(made):
            lines.append(
                "* the exact attention of the prices, and of what the seeds' plans are said to gain, is that of "
                f"commit {_commit(made)}; the measured speed below has that of commit {_commit(timed)}"
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
        for place in range(len(lengths)):
            found = record["report"]["verdicts"][place : place + 1]
            cells += [loss(v[name]) for v in found for name in ("delta_nll", "upper", "kl")] or [""] * 3
            cells += [f"{v['top1']:.2%}" for v in found] or [""]
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
        cells = speed.get(level, {})
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
        lines += table(head, rows) if rows else []
        if news:
            lines += [NEW_LENGTH, ""]
    return lines


def _times(arms: dict[str, Any], arm: dict[str, Any], what: str) -> list[str]:
    """How many times as fast as stock and as our exact attention an arm is, where that was timed."""
    return [f"{arms[one][what] / arm[what]:.2f}" if what in arm else "" for one in ("stock sdpa", "exact")]


def _peers(peers: dict[str, Any]) -> list[str]:
    lines = ["## Beside other libraries", "", *peers["words"], ""]
    if peers.get("rows"):
        head = ["what", *sorted(name for name in peers["rows"][0] if name != "what")]
        rows = [[row[k] if isinstance(row[k], str) else f"{row[k]:.3g}" for k in head] for row in peers["rows"]]
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
    lines += _made(study) + _short(study) + _seeds(study)
    for part, section in (("speed", _speed), ("prices", _prices), ("peers", _peers)):
        if part in study:
            found = section(study[part])
            if part in study.get("kept", ()):
                found.insert(1, "\nOf an earlier study: with its plans, its prices and its machine.")
            lines += found
    return "\n".join(lines)


def write_page(source: Path, target: Path) -> None:
    """Writes the page of a study's JSON."""
    from adaattn_hf._files import write_atomically

    write_atomically(target, markdown(json.loads(source.read_text(encoding="utf-8"))).encode())


def main(directory: Path, target: Path, before: Path | None = None) -> None:
    """Merges a study into `target` and writes the page beside it."""
    from .study import write

    write(target, merge(directory, before))
    write_page(target, target.with_suffix(".md"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
