"""What the GPU tests did on one card: `pytest tests/gpu --require-gpu --gpu-record docs/results` writes gpu_tests.*."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaattn_hf._files import json_text, write_atomically

OUTCOMES = ("passed", "failed", "error", "skipped")


def write(reports: Mapping[str, Sequence[Any]], made: Mapping[str, Any], directory: Path) -> None:
    """Counts reports by file and outcome, and reasons of skips, and writes them as JSON and as a page."""
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in OUTCOMES:
        for report in reports.get(outcome, ()):
            files[report.nodeid.partition("::")[0]][outcome] += 1
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports.get("skipped", ()))
    found = {"provenance": made, "files": files, "skipped": reasons}
    write_atomically(directory / "gpu_tests.json", json_text(found, indent=1, sort_keys=True) + "\n")
    rows = [*sorted(files.items()), ("all", sum(files.values(), Counter()))]
    table = [f"| {file} | {' | '.join(str(of[name]) for name in OUTCOMES)} |\n" for file, of in rows]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    page = f"""# The tests that need a GPU

Written by `pytest tests/gpu --require-gpu --gpu-record docs/results`; do not edit. {made["device"]}, {made["driver"]},
{made["cpu"]}, Python {made["python"]}, {versions}, commit {made["commit"]}.

| file | {" | ".join(OUTCOMES)} |
|---|{"---:|" * len(OUTCOMES)}
{"".join(table)}
Skipped:

{"".join(f"* {count} × {reason}" + chr(10) for reason, count in sorted(reasons.items())) or "* none" + chr(10)}"""
    write_atomically(directory / "gpu_tests.md", page)
