"""Writes docs/results/real_models: what `python -m studies.real_models` measured, a section for each device."""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from adaattn_hf._files import json_text, write_atomically

from .pages import commit, machine, table

Row = Mapping[str, Any]
Column = Callable[[Sequence[Row], Row], str]
HEAD = """# Plans for larger models

`python -m studies.real_models` calibrates each model for each length and budget, with several seeds. It checks every
plan on verification text of other sources. The plans that pass are measured on a third kind of text, which was used
for neither, to see how far the check carries. Values are medians over the seeds; minimum and maximum in brackets.

* qwen15 and qwen05 are Qwen2.5-Coder-1.5B-Instruct and 0.5B-Instruct, dequantised from 4-bit files (GGUF, Q4_K_M) to
  bfloat16; smollm2 is SmolLM2-135M-Instruct. 8b has the shape of LLaMA-8B and random weights.
* *Passed*: the 95 % upper bound of the rise in perplexity is within the budget on the verification text, and enough
  needles (sentences hidden in a long text) are found. If no plan passes, attention stays exact.
* *Stock* is Transformers' `sdpa`. *Exact* is AdaAttn without a plan, *prepared* the same after `prepare`.
* Decode steps (a record: `studies/real_models.py` at commit db566a4): one arm after another, on a GPU over a static
  cache, captured; on a CPU over a cache that grows, `DynamicCache` for stock, which a static cache beats. llama.cpp ran
  without its flash attention; its version was not recorded. Beside every arm of stock: [figures](../figures.md).
* –: not timed, or no plan passed.
"""


def write_page(out: Path, target: Path) -> None:
    """Writes page and JSON of a study's directory."""
    lines, data = [HEAD], {}
    for place in sorted(out.iterdir()):
        rows, speeds = (_read(place / room) for room in ("rows", "speed"))
        data[place.name] = {"rows": rows, "speed": speeds}
        lines += _section(rows, speeds)
    write_atomically(target / "real_models.json", json_text(data, indent=1, sort_keys=True) + "\n")
    write_atomically(target / "real_models.md", "\n".join(lines).rstrip() + "\n")


def _read(place: Path) -> list[Row]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in place.glob("*.json")]
    return sorted(found, key=lambda one: (one["model"], one["length"], one.get("nats", 0), one.get("seed", 0)))


def _section(rows: Sequence[Row], speeds: Sequence[Row]) -> list[str]:
    made = [one["provenance"] for one in (*rows, *speeds)]
    first, commits = made[0], ", ".join(sorted({commit(one) for one in made}))
    versions = ", ".join(f"{name} {first['versions'][name]}" for name in ("torch", "transformers"))
    own, random = ([one for one in rows if one["random"] == drawn] for drawn in (False, True))
    lines = [f"## {machine(first)}", "", *_summary(own, speeds)]
    texts = {kind: sorted({name for one in rows for name in one["sources"][kind]}) for kind in TEXTS if rows}
    lines += [f"* {TEXTS[kind]}: {', '.join(names)}." for kind, names in texts.items()]
    lines += [f"* Prices measured on: {', '.join(sorted({one['priced'] for one in rows}))}."] if rows else []
    lines += [f"* {first['driver'] or first['cpu']}; {versions}; commit {commits}.", ""]
    lines += _table("Loss", own, speeds, QUALITY)
    failed = [one for one in own if not one["met"]]
    refused = [[one["model"], f"{one['length']:,}", one["budget"], str(one["seed"]), _reason(one)] for one in failed]
    lines += table(["model", "tokens", "budget", "seed", "why no plan passed"], refused) if refused else []
    lines += _table("Speedup of a prompt", _met(own), speeds, SPEED)
    lines += _table("Calibration", own, speeds, COSTS)
    lines += _table("Calibration with random weights, for time and memory", random, speeds, COSTS)
    return lines + _generation(speeds)


def _summary(rows: Sequence[Row], speeds: Sequence[Row]) -> list[str]:
    """What was found, budget by budget, and of decode steps."""
    lines = []
    for budget in dict.fromkeys(one["budget"] for one in rows):
        own = [one for one in rows if one["budget"] == budget]
        lost = sum("needles are lost" in one["sentence"] for one in own if not one["met"])
        lines += [f"* Budget {budget}: {len(_met(own))} of {len(own)} calibrations found a plan that passed"]
        lines[-1] += f"; {lost} others lost too many needles." if lost else "."
        gains = [time for speed in speeds for time in _ratios(own, speed, "passes", "stock")]
        lines[-1] += f" A whole prompt is {_span(gains)} times as fast as stock." if gains else ""
    if rows:
        most = max(one["peak_gb"] / one["predicted_gb"] for one in rows)
        lines += [f"* Calibration held up to {most:.1f} times as much memory as was forecast: leave room."]
    times: dict[str, list[float]] = {}
    for figures in (figures for one in speeds for part, figures in one.items() if part.startswith("steps ")):
        for name, own_figures in figures.items():
            arm = name if name in ORDER else "with a plan"
            times.setdefault(arm, []).append(own_figures["tokens_per_second"] / figures["stock"]["tokens_per_second"])
    ranges = [f"{arm} {_span(own)}" for arm, own in times.items() if arm != "stock"]
    return [*lines, f"* Decoding, tokens per second over stock: {', '.join(ranges)}."] if ranges else lines


def _span(values: Sequence[float]) -> str:
    ends = f"{min(values):.2f}", f"{max(values):.2f}"
    return " to ".join(dict.fromkeys(ends))


def _table(title: str, rows: Sequence[Row], speeds: Sequence[Row], columns: Mapping[str, Column]) -> list[str]:
    body = cells(rows, speeds, columns)
    return [f"### {title}", "", *table(["model", "tokens", "budget", *columns], body)] if body else []


key_of = itemgetter("model", "length", "budget")
"""What a line of a table is of."""


def cells(rows: Sequence[Row], speeds: Sequence[Row], columns: Mapping[str, Column]) -> list[list[str]]:
    """A line of a table for each model, length and budget: these, and the columns over all seeds."""
    by_model = {(one["model"], one["length"]): one for one in speeds}
    body = []
    for (model, length, budget), group in groupby(rows, key=key_of):
        seeds = list(group)
        cell = [column(seeds, by_model.get((model, length), {})) for column in columns.values()]
        body.append([model, f"{length:,}", budget, *cell])
    return body


def _reason(row: Row) -> str:
    """Why a budget was not met, in few words."""
    text = re.sub(r"^the budget of .*? cannot be met: (failed: )?|; the plan is exact$", "", row["sentence"])
    text = re.sub(r"the perplexity may rise by (\S+ %), (\S+ %) is allowed \(.*?\)", r"bound \1, limit \2", text)
    return text.replace(", more than", ", limit")


def _over(values: Iterable[float], words: str) -> str:
    """The median, and the range where there are several."""
    own = sorted(values)
    if not own:
        return "–"
    middle = words.format(statistics.median(own))
    return middle if len(own) == 1 else f"{middle} ({words.format(own[0])} to {words.format(own[-1])})"


def _met(rows: Sequence[Row]) -> list[Row]:
    return [one for one in rows if one["met"]]


def _inside(key: str) -> Column:
    def column(rows: Sequence[Row], _: Row) -> str:
        own = _met(rows)
        return f"{sum(one['third'][key] <= one['nats'] for one in own)} of {len(own)}" if own else "–"

    return column


def _rise(key: str) -> Column:
    return lambda rows, _: _over((100 * math.expm1(one["third"][key]) for one in _met(rows)), "{:+.3f}")


def _ratios(rows: Sequence[Row], speed: Row, part: str, over: str) -> list[float]:
    """How many times as fast the plans of rows are as another arm, where they were timed."""
    taken = {name: one["median"] if part == "passes" else one for name, one in speed.get(part, {}).items()}
    own = [one for one in rows if (one["model"], one["length"]) == (speed.get("model"), speed.get("length"))]
    return [taken[over] / taken[name] for name in (f"{one['budget']} {one['seed']}" for one in own) if name in taken]


def _times(part: str, over: str) -> Column:
    return lambda rows, speed: _over(_ratios(rows, speed, part, over), "{:.2f}")


def _own(key: str, words: str, of: Callable[[Sequence[Row]], Sequence[Row]] = list) -> Column:
    return lambda rows, _: _over((one[key] for one in of(rows) if one[key]), words)


GAINS: dict[str, Column] = {
    "kept": lambda rows, _: f"{len(_met(rows))} of {len(rows)}",
    "bound / budget": lambda rows, _: _over((one["verdict"]["upper"] / one["nats"] for one in _met(rows)), "{:.0%}"),
    "third kind, %": _rise("delta_nll"),
    "inside": _inside("delta_nll"),
    "its bound, %": _rise("upper"),
    "bound inside": _inside("upper"),
    "whole pass × stock": _times("passes", "stock"),
    "× exact": _times("passes", "exact"),
}
QUALITY = {
    "passed": GAINS["kept"],
    "bound, share of the budget": GAINS["bound / budget"],
    "rise on unseen text, %": GAINS["third kind, %"],
    "within budget": GAINS["inside"],
    "95 % upper bound there, %": GAINS["its bound, %"],
    "bound within budget": GAINS["bound inside"],
}
SPEED = {
    "whole model, over stock": GAINS["whole pass × stock"],
    "over exact": GAINS["× exact"],
    "attention over exact, measured": _times("attention", "exact"),
    "predicted by prices": _own("by_prices", "{:.2f}"),
    "times fewer query-key pairs": _own("fewer_pairs", "{:.2f}"),
}
COSTS: dict[str, Column] = {
    "seconds, without loading": _own("seconds", "{:.0f}"),
    "of which before the first plan": _own("measuring", "{:.0f}"),
    "peak memory, GB": _own("peak_gb", "{:.1f}"),
    "forecast, GB": _own("predicted_gb", "{:.1f}"),
}
TEXTS = {"calibration": "Calibration text", "proof": "Verification text", "third": "Unseen text"}
ORDER = ("stock", "prepared", "exact", "int8")


def _generation(speeds: Sequence[Row]) -> list[str]:
    """Seconds of a prompt, and tokens a second."""
    body, prompts = [], []
    for one in speeds:
        passes = one.get("passes", {})
        for name in [name for name in ORDER if name in passes]:
            prompts.append([one["model"], f"{one['length']:,}", name, f"{passes[name]['median']:.3g}"])
        for budget in dict.fromkeys(name.split()[0] for name in passes if name not in ORDER):
            taken = [own["median"] for name, own in passes.items() if name.split()[0] == budget]
            prompts.append([one["model"], f"{one['length']:,}", f"plan {budget}", _over(taken, "{:.3g}")])
        for part in sorted(name for name in one if name.startswith("steps ")):
            for name in sorted(one[part], key=lambda name: ((*ORDER, name).index(name), name)):
                own, arm = one[part][name], name if name in ORDER else f"plan {name.split()[0]}"
                times = f"{own['tokens_per_second'] / one[part]['stock']['tokens_per_second']:.2f}"
                speed = [f"{own['tokens_per_second']:.1f}", times, f"{own['bytes_per_token']:,.0f}"]
                body.append([one["model"], f"{one['length']:,}", part.removeprefix("steps "), arm, *speed])
        if "llama.cpp" in one:
            own, arm = one["llama.cpp"], "llama.cpp, 4-bit weights"
            prompts.append([one["model"], f"{one['length']:,}", arm, f"{own['median']:.3g}"])
            body.append([one["model"], f"{one['length']:,}", "1", arm, f"{own['tokens_per_second']:.1f}", "–", "–"])
    lines = ["### Seconds of a prompt", "", *table(["model", "tokens", "arm", "seconds"], prompts)] if prompts else []
    head = ["model", "tokens in the cache", "batch", "arm", "tokens/s", "over stock", "cache bytes per token"]
    return [*lines, "### Generation", "", *table(head, body)] if body else lines
