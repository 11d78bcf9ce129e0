"""The record of a search: `fuzz.json` and `fuzz.md`."""

import collections
import datetime
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from adaattn_hf._files import write_atomically
from adaattn_hf.backends.capability import cpu_name
from adaattn_hf.backends.native.library import library

from .kinds import KINDS, VERDICTS

ROOT = Path(__file__).resolve().parents[3]
HEADINGS = (
    "served rightly", "refused in words", "refused by torch, as stock is", "not judged: stock's forms differ",
    "wrong", "crashed",
)  # fmt: skip
ABOUT = """\
# Random calls

Made by `make fuzz` (`tests/property/search.py`), which goes on where it was interrupted; the numbers lie in
`fuzz.json`. A malformed call is a valid one after one or two changes: wrong shapes, dtypes, strides, devices, lengths,
structures, numbers. It must be refused by a sentence of the package, be refused by torch where stock attention is
refused, too, or be answered as the formula has it. A tiny model must compute what stock attention computes, in every
row in which its eager and its sdpa form agree, and of packed documents what it computes of each alone. Under a plan,
tokens that come in pieces, in company or past the plan's lengths must be what one pass over the sequence alone makes of
them; what a plan file says of its own proof must change no verdict. Torch's default dtype is float32 or bfloat16. Where
a fix of this package is taken out, the search reports it: `tests/property/test_searching.py`.
"""


def record(done: dict[str, Any], directory: Path) -> None:
    native = library()
    assert native is not None
    found = {key: done[key] for key in ("seed", "verdicts", "failed", "commits")}
    found["native"] = [json.loads(p.read_text()) for p in sorted((ROOT / "build").glob("fuzz_*.json"))]
    found["date"] = datetime.date.today().isoformat()
    versions = f"torch {torch.__version__}, Transformers {transformers.__version__}"
    found["machine"] = f"{cpu_name()}, {native.level_name}, {versions}"
    write_atomically(directory / "fuzz.json", json.dumps(found, indent=1) + "\n")
    lines = [
        ABOUT,
        f"Seed {found['seed']}, {found['date']}, commit {', '.join(map(str, found['commits']))}; {found['machine']}.",
        "", f"| calls | number | {' | '.join(HEADINGS)} |", f"|---|---:|{'---:|' * len(HEADINGS)}",
    ]  # fmt: skip
    for kind, about in KINDS.items():
        counts = collections.Counter(found["verdicts"].get(kind, {}))
        cells = [counts[verdict] for verdict in VERDICTS]
        lines.append(f"| {about.words} | {counts.total()} | {' | '.join(map(str, cells))} |")
    if found["native"]:
        lines += ["", "Through the C interface alone, as many valid calls and as many malformed ones:", ""]
        lines += ["| machine | each | seed | by | date | failed |", "|---|---:|---:|---|---|---|"]
        lines += [
            f"| {' | '.join(str(one[key]) for key in ('machine', 'cases', 'seed', 'by', 'date'))} "
            f"| {', '.join(one['failed']) or 'none'} |" for one in found["native"]
        ]  # fmt: skip
    write_atomically(directory / "fuzz.md", "\n".join(lines) + "\n")
