"""Tables of reports, for the terminal and in Markdown. Every figure in them is read from the JSON."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from adaattn_hf._files import printable
from adaattn_hf.plans.wording import at_most, in_nats, rise, signed_nats

from .pages import harmless
from .provenance import processor

Report = Mapping[str, Any]
Rows = list[tuple[str, list[str]]]

ABSENT = "-"
BEYOND = 1e6
"""From here on a perplexity is written in four digits, and one of words says nothing of the model."""
_CHANGE, _TIMES = "change of the perplexity, 95 % CI", "whole model, times as fast [quartiles]"
BRIEF = {
    "pages": {
        "perplexity per token": "perplexity", _CHANGE: "change, 95 % CI",
        "at most, one-sided 95 % bound": "at most, 95 %", _TIMES: "times as fast", "tokens scored": "tokens",
    },
    "lastword": {
        "items": "passages", "accuracy, last word": "accuracy", "perplexity, last word": "perplexity, word",
        _CHANGE: "change, token", _TIMES: "times as fast",
    },
}  # fmt: skip
"""Rows of a short table by the kind of text, as they are called there."""


def rows(report: Report) -> tuple[list[str], Rows]:
    """(column heads, rows) of one report: a column per arm, a row per quantity."""
    arms, kind = report["quality"]["arms"], report["data"]["kind"]
    comparisons = [None, *report["quality"]["comparisons"]]
    speeds, memory = report["cost"]["speed"], report["cost"]["memory"]
    nats = partial(signed_nats, digits=3)
    table: Rows = []

    def number(value: Any, form: str) -> str:
        return ABSENT if value is None else format(value, ".4g" if form.endswith("f") and value >= BEYOND else form)

    def limits(entry: Mapping[str, Any], show: Callable[[float], str] = nats) -> str:
        if entry["low"] is None:
            return f"{show(entry['mean'])} (one cluster: no interval)"
        return "{} [{}, {}]".format(*(show(entry[name]) for name in ("mean", "low", "high")))

    def bound(entry: Mapping[str, Any], show: Callable[[float], str]) -> str:
        return ABSENT if entry["upper"] is None else show(entry["upper"])

    def per_arm(label: str, key: str, form: str) -> None:
        if any(a.get(key) is not None for a in arms):
            table.append((label, [number(a.get(key), form) for a in arms]))

    def compared(label: str, show: Callable[[Mapping[str, Any]], str]) -> None:
        table.append((label, [ABSENT if c is None else show(c) for c in comparisons]))

    def times_as_fast(label: str, key: str) -> None:
        spread = "{median:.3f} [{quartile_25:.3f}, {quartile_75:.3f}]"
        table.append((label, [spread.format(**s[key]) if key in s else ABSENT for s in speeds]))

    if kind == "lastword":
        per_arm("items", "items", "d")
        per_arm("accuracy, last word", "accuracy", ".4f")
        per_arm("perplexity, last word", "last_word_perplexity", ".6f")
        compared("Δnll per word, 95 % CI (nats)", lambda c: limits(c["delta_nll_per_word"]))
        lost = "{lost} / {won}, {mcnemar_p:.3g}"
        compared("flips: lost / won, McNemar p", lambda c: lost.format(**c["flips"]))
    per_arm("perplexity per token", "perplexity", ".6f")
    compared(_CHANGE, lambda c: limits(c["delta_nll"], rise))
    compared("at most, one-sided 95 % bound", lambda c: bound(c["delta_nll"], at_most))
    times_as_fast(_TIMES, "speed_ratio_wall")
    per_arm("tokens scored", "tokens", "d")
    per_arm("nll (nats/token)", "nll_per_token", ".8f")
    if kind == "pages":
        per_arm("perplexity per word", "word_perplexity", ".6f")
        per_arm("perplexity per byte", "byte_perplexity", ".6f")
        per_arm("bits per byte", "bits_per_byte", ".6f")
    compared("Δnll, 95 % CI (nats/token)", lambda c: limits(c["delta_nll"]))
    compared("Δnll, one-sided 95 % bound", lambda c: bound(c["delta_nll"], nats))
    compared("mean absolute Δnll per token", lambda c: in_nats(c["abs_delta_nll_mean"], 3))
    compared("KL, mean (nats/token)", lambda c: in_nats(c["kl_mean"], 3))
    compared("KL, 99.9th percentile", lambda c: in_nats(c["kl_p999"], 3))
    compared("top-1 agreement", lambda c: f"{c['top1_agreement']:.5f}")
    table.append(("activation rate", [number(a["rate"], ".4f") for a in report["activation"]]))
    times_as_fast("times as fast in processor time", "speed_ratio_process")
    table.append(("model tokens per second", [f"{s['tokens_per_s']:.1f}" for s in speeds]))
    table.append(("peak memory (MiB)", [f"{m['peak_bytes'] / 2**20:.1f}" for m in memory]))
    return [f"{a['implementation']} ({a['role']})" for a in arms], table


def remarks(report: Report) -> list[str]:
    """Why there is no figure per word, or a strange one."""
    words, perplexity = (report["quality"]["arms"][0].get(name) for name in ("words", "word_perplexity"))
    if report["data"]["kind"] != "pages" or not words or (perplexity is not None and perplexity < BEYOND):
        return []
    return [f"The text is too short for a perplexity per word ({_count(words, 'word')}), or strange to the model"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def title(report: Report) -> str:
    """One line: model, data, dtype, and what the cache stores where one is read."""
    model, data, cache = report["model"], report["data"], report["settings"].get("cache")
    words = f"{model['name']} on {data['name']} ({_count(data['documents'], 'document')}), {model['dtype']}"
    return words if cache is None else f"{words}, cache {cache}"


def terminal_table(report: Report, verbose: bool) -> Table:
    """The report as a rich table: all rows, or five that fit a terminal of 80 columns."""
    heads, table = rows(report)
    caption = ". ".join([report["protocol"], *remarks(report)])
    if not verbose:
        short, caption = BRIEF[report["data"]["kind"]], "all rows: --verbose, and report.md"
        table = [(short[label], values) for label, values in table if label in short]
    shown = Table(title=Text(printable(title(report))), caption=Text(printable(caption)))
    shown.add_column("")
    for head in heads:
        shown.add_column(Text(printable(head)), justify="right", overflow="fold")
    for label, values in table:
        shown.add_row(Text(label), *(Text(value.replace(" %", "%")) for value in values))
    return shown


def bounds(report: Report, max_ppl_ratio: float | None) -> list[dict[str, Any]]:
    """What was asked for, held against the one-sided 95 % bound of the tested arm's perplexity over stock's.

    A run with a single cluster proves nothing, and keeps no bound.
    """
    if max_ppl_ratio is None:
        return []
    upper = report["quality"]["comparisons"][0]["perplexity_ratio"]["upper"]
    kept = upper is not None and upper <= max_ppl_ratio
    sentence = "no interval: the text is one document of one window; give more text"
    if upper is not None:
        sentence = f"the one-sided 95 % perplexity-ratio bound is {upper:.9g}, {'within' if kept else 'above'} it"
    return [{"name": "max_ppl_ratio", "asked": max_ppl_ratio, "found": upper, "kept": kept, "sentence": sentence}]


def markdown(reports: Sequence[Report]) -> str:
    """The reports as Markdown sections."""
    return "\n".join(_section(report) for report in reports)


def _section(report: Report) -> str:
    heads, table = rows(report)
    source, data, settings = report["provenance"], report["data"], report["settings"]
    first = report["quality"]["comparisons"][0]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    lines = [
        f"## {harmless(title(report))}",
        "",
        "| | " + " | ".join(map(harmless, heads)) + " |",
        "|---" * (len(heads) + 1) + "|",
        *(f"| {label} | " + " | ".join(values) + " |" for label, values in table),
        "",
        f"* Protocol: {report['protocol']}. Batch size {settings['batch_size']}, padding {settings['padding']}.",
    ]
    if settings.get("cache") is not None:
        streaming = " with streaming heads" if settings.get("streaming") else ""
        lines.append(
            f"* Cache: windows are read in pieces of {settings['cache_piece']} tokens, by the tested arm over an "
            f"`AdaAttnCache` of {settings['cache']}{streaming}, by the others over a `DynamicCache`. Its rounding is "
            "no part of the activation rate."
        )
    lines += [
        *(f"* {line}." for line in remarks(report)),
        f"* Data: {harmless(data['origin'])}, sha256 of the documents `{data['sha256'][:16]}…`; "
        f"weights `{report['model']['weights_sha256'][:16]}…`.",
        f"* Confidence: clusters are {first['clusters_are']}, {first['delta_nll']['clusters']} of them.",
        f"* Machine: {processor(source)}, {source['threads']} threads, device {source['device']}; python "
        f"{source['python']}, {versions}; commit {source['commit'] or 'none'}.",
    ]
    lines += [
        f"* Plan of {p['role']}: {harmless(p['path'])}, budget {p['budget']:g} nats/token, "
        f"sha256 `{p['sha256'][:16]}…`."
        for p in report.get("plans", [])
        if p
    ]
    reasons = {a["implementation"]: a["reason"] for a in report["activation"] if a["reason"]}
    lines += [f"* Activation rate of {name}: {reason}." for name, reason in reasons.items()]
    lines += [f"* Bound {b['name']}: asked {b['asked']:g}, {b['sentence']}." for b in report.get("bounds", [])]
    return "\n".join(lines) + "\n"
