"""Writes what the tests cover, by directory, from coverage's JSON: `make cover` runs it.

python tests/conformance/covered.py build/coverage.json docs/results/coverage.md "tests"
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from adaattn_hf._files import write_atomically
from adaattn_hf.eval.provenance import processor, provenance

COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def share(whole: int, part: int) -> str:
    """A part in percent; rounded down, so that 100 means all."""
    return f"{1000 * part // whole / 10:g} %" if whole else "–"


def page(covered: dict[str, Any], tests: str, made: dict[str, Any]) -> str:
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, file in covered["files"].items():
        for room in (f"`{Path(name).parent.as_posix()}`", "all"):
            rooms[room].update({count: file["summary"][count] for count in COUNTS})
    rows = []
    for room, of in sorted(rooms.items(), key=lambda item: (item[0] == "all", item[0])):
        lines, run, branches, taken = (of[count] for count in COUNTS)
        rows.append(f"| {room} | {lines} | {share(lines, run)} | {branches} | {share(branches, taken)} |\n")
    device = "without a GPU: its kernels count as not run" if made["device"] == "cpu" else f"on {made['device']}"
    return f"""# Coverage of the tests

Made by `make cover`; do not edit. `pytest {tests}`, {device}.
{processor(made)}, Python {made["python"]}, coverage {covered["meta"]["version"]}, torch {made["versions"]["torch"]},
transformers {made["versions"]["transformers"]}, commit {made["commit"]}.

| directory | statements | run | branches | taken |
|---|---:|---:|---:|---:|
{"".join(rows)}"""


if __name__ == "__main__":
    source, out, ran = sys.argv[1:]
    here = provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    write_atomically(Path(out), page(json.loads(Path(source).read_text(encoding="utf-8")), ran, here))
