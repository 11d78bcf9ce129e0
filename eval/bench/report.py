"""`BENCHMARKS.md` from the JSON of a run. Every figure is read from there."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from ..pages import harmless
from ..provenance import processor

_HEAD = """# Benchmarks {where}

Written by `adaattn bench` from `{source}`; do not edit. Ratios are medians over rounds of the time of a stock
implementation divided by the time of `adaattn` in the same round (above 1: `adaattn` is faster), quartiles in brackets.
`best` is the fastest stock implementation of the cell. Masks, packing and routing are inside the time. Cells where
`adaattn` is slower are listed like the others, and once more below. Not every implementation was timed in every cell;
the JSON names those of each. A cell speaks for the commit at which it was measured, not for later changes.

{machine}
"""


def markdown(report: Mapping[str, Any], source: str) -> str:
    """The whole file."""
    report = harmless(report)
    made = report["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    commits = ", ".join(sorted({(cell["commit"] or "not known")[:12] for cell in report["cells"]}))
    device = f"{made['device']} ({made['driver']})" if made["driver"] else made["device"]
    machine = (
        f"Machine: {processor(made)}, {made['cores']} cores, {made['threads']} threads, device {device}. "
        f"Python {made['python']}; {versions}. Commits {commits}. Rounds: at most {report['rounds']}."
    )
    raced = [cell for cell in report["cells"] if cell.get("runs")]
    where = f"{'beside other programs ' * bool(raced)}on {made['device'] if made['driver'] else processor(made)}"
    lines = [_HEAD.format(where=where, source=harmless(source), machine=machine)]
    lines += [line for cell in raced for line in _race(cell)]
    lines += _answers(raced)
    for level, title in (("attention", "Attention"), ("model", "Whole models")):
        cells = [cell for cell in report["cells"] if cell["level"] == level and cell not in raced]
        if cells:
            lines += [f"## {title}", "", *_table(cells), ""]
    best = {cell["title"]: cell["ratio_best"]["wall"]["median"] for cell in report["cells"] if cell["ratio_best"]}
    slower = [f"{title} {ratio:.2f}" for title, ratio in best.items() if ratio < 1]
    if slower:
        lines += ["## Slower than the fastest stock", "", "; ".join(slower) + ".", ""]
        lines += [report["slower"], ""] if report["slower"] else []
    absent = [f"{name} ({why})" for name, why in report["absent"].items()]
    if absent:
        lines += ["## Not measured", "", "; ".join(absent) + ".", ""]
    refused: dict[tuple[str, str], list[str]] = {}
    for cell in report["cells"]:
        for refusal in cell["refused"].items():
            refused.setdefault(refusal, []).append(cell["title"])
    if refused:
        bullets = (f"* {name} in {', '.join(titles)}: {why}" for (name, why), titles in refused.items())
        lines += ["## Refused", "", *bullets, ""]
    return "\n".join(lines)


def _table(cells: list[Mapping[str, Any]]) -> list[str]:
    rows = [
        "| cell | adaattn ms | best stock | × best, wall | × best, process | × eager "
        "| peak MiB, adaattn / best / eager |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        ours, best = cell["times"]["adaattn"], cell["best"]
        eager = cell["ratios"].get("eager")
        peaks = [cell["peak_bytes"].get(name) for name in ("adaattn", best, "eager")]
        memory = " / ".join("-" if peak is None else f"{peak / 2**20:.3g}" for peak in peaks)
        rows.append(
            f"| {cell['title']} | {ours['wall']['median'] * 1e3:.3g} | {best or '-'} "
            f"| {_ratio(cell['ratio_best'], 'wall')} | {_ratio(cell['ratio_best'], 'process')} "
            f"| {_ratio(eager, 'wall')} | {memory} |"
        )
    return rows


def _race(cell: Mapping[str, Any]) -> list[str]:
    """Every arm of a cell, fastest first."""
    shape, best, runs, spread = cell["shape"], cell["best"], cell["runs"], "{:.4g} ({:.4g}–{:.4g})".format
    real = sum(shape["lengths"]) / shape["batch"] / shape["q_len"] if shape["lengths"] else 1
    versions = dict.fromkeys(" ".join(pair) for run in runs.values() for pair in run["versions"].items())
    conditions = f"{real:.0%} of them real; {'not ' * (not shape['prepared'])}prepared. Best of stock: {best}."
    head = ("arm", "ms", "its time over ours", "1 − least cosine to float32", "peak of the process, MiB", "settings")
    size = f"{shape['batch']} x {shape['kv_len']:,} tokens"
    lines = [f"## {cell['title']}", "", f"{size}, {conditions} {', '.join(versions)}."]
    lines += ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, times in sorted(cell["times"].items(), key=lambda item: item[1]["wall"]["median"]):
        over = cell["ratios"].get(name, {"wall": dict.fromkeys(times["wall"], 1.0)})["wall"].values()
        peak = cell["peak_bytes"].get(name, 0) / 2**20
        settings = ", ".join(f"{key} {value}" for key, value in runs[name].items() if key != "versions")
        shown = f"**{name}**" if name == best else name
        wall = spread(*(1e3 * seconds for seconds in times["wall"].values()))
        lines.append(f"| {shown} | {wall} | {spread(*over)} | {cell['error'][name]:.2g} | {peak:.0f} | {settings} |")
    return [*lines, ""]


def _answers(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Up to which answers ours ends first, beside each arm that reads a model's prompt slower and steps faster."""
    lines = []
    for prompt, step in permutations(cells, 2):
        read, token = prompt["shape"], step["shape"]
        if not token["cached"] or read != {**token, "q_len": token["kv_len"]}:
            continue
        median = {name: [cell["times"][name]["wall"]["median"] for cell in (prompt, step)] for name in step["times"]}
        reads, writes = median.pop("adaattn")
        lines += [
            f"* {name}: {(other - reads) / (writes - steps):,.0f} tokens behind {token['kv_len']:,}"
            for name, (other, steps) in median.items()
            if other > reads and steps < writes
        ]
    told = "Longest answers, by medians of prompt and step, that `adaattn` ends before what steps faster:"
    return ["## Whole answers", "", told, "", *lines, ""] if lines else []


def _ratio(entry: Mapping[str, Any] | None, clock: str) -> str:
    if entry is None:
        return "-"
    ratio = entry[clock]
    return f"{ratio['median']:.2f} [{ratio['quartile_25']:.2f}, {ratio['quartile_75']:.2f}]"
