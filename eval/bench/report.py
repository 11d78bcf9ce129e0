"""`BENCHMARKS.md` from the JSON of a run. Every figure is read from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..pages import harmless
from ..provenance import processor

_HEAD = """# Benchmarks

Written by `adaattn bench` from `{source}`; do not edit. Ratios are medians over rounds of the time of a stock
implementation divided by the time of `adaattn` in the same round (above 1: `adaattn` is faster), quartiles in brackets.
`best` is the fastest stock implementation of the cell. Masks, packing and routing are inside the time. Cells where
`adaattn` is slower are listed like the others, and once more below. Not every implementation was timed in every cell;
the JSON names those of each. A cell speaks for the commit at which it was measured, not for later changes.

{machine}
"""


def verdict(cell: Mapping[str, Any]) -> str:
    """`reached`, `missed` or nothing, from the cell's target."""
    if cell["target"] is None or cell["ratio_best"] is None:
        return ""
    return "reached" if cell["ratio_best"]["wall"]["median"] >= cell["target"] else "missed"


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
    lines = [_HEAD.format(source=harmless(source), machine=machine)]
    for level, title in (("attention", "Attention"), ("model", "Whole models")):
        cells = [cell for cell in report["cells"] if cell["level"] == level]
        if cells:
            lines += [f"## {title}", "", *_table(cells), ""]
    missed = [cell for cell in report["cells"] if verdict(cell) == "missed"]
    if missed:
        lines += ["## Missed", "", *(f"* {cell['title']}: {cell['note'] or 'no reason known'}" for cell in missed), ""]
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
        for said in cell["refused"].items():
            refused.setdefault(said, []).append(cell["title"])
    if refused:
        said_of = (f"* {name} in {', '.join(titles)}: {why}" for (name, why), titles in refused.items())
        lines += ["## Refused", "", *said_of, ""]
    return "\n".join(lines)


def _table(cells: list[Mapping[str, Any]]) -> list[str]:
    rows = [
        "| cell | adaattn ms | best stock | × best, wall | × best, process | × eager "
        "| peak MiB, adaattn / best / eager | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        ours, best = cell["times"]["adaattn"], cell["best"]
        eager = cell["ratios"].get("eager")
        peaks = [cell["peak_bytes"].get(name) for name in ("adaattn", best, "eager")]
        memory = " / ".join("-" if peak is None else f"{peak / 2**20:.3g}" for peak in peaks)
        target = "" if cell["target"] is None else f"{cell['target']:g} {verdict(cell)}"
        rows.append(
            f"| {cell['title']} | {ours['wall']['median'] * 1e3:.3g} | {best or '-'} "
            f"| {_ratio(cell['ratio_best'], 'wall')} | {_ratio(cell['ratio_best'], 'process')} "
            f"| {_ratio(eager, 'wall')} | {memory} | {target} |"
        )
    return rows


def _ratio(entry: Mapping[str, Any] | None, clock: str) -> str:
    if entry is None:
        return "-"
    found = entry[clock]
    return f"{found['median']:.2f} [{found['quartile_25']:.2f}, {found['quartile_75']:.2f}]"
