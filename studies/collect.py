"""Reports that are kept, on one page: `python -m studies.collect DIRECTORY [NAME=RUN …]`.

`NAME=RUN` first keeps the reports of a finished run of `adaattn eval --output RUN` as `NAME-DATA.json`. The directory
holds reports of `adaattn eval` as `*.json`, and `known.json`: stock figures that were measured before, by other code,
with the report that repeats each of them. The page, `README.md` in the same directory, is written from these files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaattn_hf._files import write_atomically
from adaattn_hf.eval import report

KNOWN = "known.json"
PAGE = "README.md"
_HEAD = """# Quality against stock attention, measured

Reports of `adaattn eval`. This page is written from the JSON files beside it by `python -m studies.collect`.
"""
_KNOWN_HEAD = """## Stock figures that were known before

Perplexities of stock attention (CPU, float32) that other code had measured on the same files. Log-probabilities are
taken in float64 here; in float32 the log-softmax over a large vocabulary is biased by up to 1e-5 nats.

| report | quantity | known | found | relative difference |
|---|---|---|---|---|"""


def page(directory: Path) -> str:
    """The page of a directory of reports."""
    reports = {path.stem: _read(path) for path in sorted(directory.glob("*.json")) if path.name != KNOWN}
    known = _read(directory / KNOWN) if (directory / KNOWN).exists() else []
    parts = [_HEAD]
    if known:
        parts.append("\n".join([_KNOWN_HEAD, *(_row(entry, reports) for entry in known)]) + "\n")
    return "\n".join([*parts, report.markdown(list(reports.values()))])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _row(entry: Mapping[str, Any], reports: Mapping[str, Any]) -> str:
    name, quantity, value = entry["report"], entry["quantity"], entry["value"]
    found = reports[name]["quality"]["arms"][0][quantity] if name in reports else None
    if found is None:
        return f"| {name} | {quantity} | {value} | not measured | |"
    return f"| {name} | {quantity} | {value} | {found:.6g} | {found / value - 1:+.1e} |"


def keep(directory: Path, name: str, run: Path) -> list[Path]:
    """Copies a finished run's reports into the directory, one per data set.

    Raises:
        FileNotFoundError: The run has no report, so that it is not finished or not there.
    """
    reports = sorted(run.glob("*/report.json"))
    if not reports:
        raise FileNotFoundError(
            f"{run}: no report in it; finish the run with adaattn eval … --output {run} --resume"
        )
    kept = []
    for report_file in reports:
        target = directory / f"{name}-{report_file.parent.name}.json"
        write_atomically(target, report_file.read_bytes())
        kept.append(target)
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep the runs that are named, and write the directory's page."""
    directory, *runs = map(str, sys.argv[1:] if arguments is None else arguments)
    for entry in runs:
        name, _, run = entry.partition("=")
        keep(Path(directory), name, Path(run))
    write_atomically(Path(directory) / PAGE, page(Path(directory)).encode())


if __name__ == "__main__":
    main()
