"""A long random search through the package's own faces: `make fuzz CASES=100000`.

Valid calls are compared with the reference in double precision, forward and backward. Malformed ones must be refused
in words or be answered as the formula has it. Work goes in chunks, each in a process of its own, so that a crash is an
observation and not the end; what is done is kept in a state file, and the same command goes on from there. The record
of what was done is written to `--write`, at the end or alone by `--record`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies._internal.core import CompositeStrategy
from hypothesis.strategies._internal.lazy import unwrap_strategies
from hypothesis.strategies._internal.misc import BooleansStrategy
from hypothesis.strategies._internal.numbers import IntegersStrategy
from hypothesis.strategies._internal.strategies import SampledFromStrategy

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the other tests

CHUNK = 10_000
KINDS = {"valid": 0.9, "plans": 0.1, "malformed": 0.7, "rules": 0.2, "stored": 0.1}
"""Kinds of calls with their shares: of the valid ones, and of the malformed ones."""
WORDS = {
    "valid": "valid calls, forward or with gradients, against double precision",
    "plans": "valid calls under random plans, as they are and as a traced graph holds them",
    "malformed": "malformed calls of the attention function",
    "rules": "malformed rules of the native kernels",
    "stored": "malformed tokens on their way into a cache",
}


class Drawing:
    """Draws from strategies without hypothesis' engine, which costs more than most calls and repeats what it drew."""

    def __init__(self, seed: str) -> None:
        """The same seed draws the same."""
        self.source = random.Random(seed)

    def __call__(self, strategy: Any, label: object = None) -> Any:
        """A value of the strategy; the few kinds that nearly all calls are made of have a way of their own."""
        strategy = unwrap_strategies(strategy)
        if isinstance(strategy, CompositeStrategy):
            return strategy.definition(self, *strategy.args, **strategy.kwargs)
        if isinstance(strategy, SampledFromStrategy):
            return self.source.choice(strategy.elements)
        if isinstance(strategy, IntegersStrategy):
            return self.source.randint(strategy.start, strategy.end)
        if isinstance(strategy, BooleansStrategy):
            return self.source.random() < 0.5
        return ConjectureData(random=self.source).draw(strategy)


def chunk(kind: str, seed: int, cases: int, library: Path | None) -> dict[str, Any]:
    """Runs a chunk in this process; returns the number of each verdict and what failed."""
    import torch

    from adaattn_hf.backends.native import library as native

    if library is not None:
        native._library, native._missing = native.load(library)
    if native.missing():
        raise SystemExit("; ".join(native.missing()))
    from tests.support import malformed, malformed_rules, planned, valid

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kinds: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "valid": (valid.calls(), valid.judge),
        "plans": (planned.planned(), planned.judge),
        "malformed": (malformed.malformed(), malformed.judge),
        "rules": (malformed_rules.native_calls(), malformed_rules.judge_native),
        "stored": (malformed_rules.stored_calls(), malformed_rules.judge_stored),
    }
    strategy, judge = kinds[kind]
    verdicts: collections.Counter[str] = collections.Counter()
    failed: list[str] = []
    draw = Drawing(f"{kind} {seed}")
    while verdicts.total() < cases:
        try:
            call = draw(strategy)
        except UnsatisfiedAssumption:
            continue
        try:
            verdicts[judge(call)] += 1
        except AssertionError as error:
            verdicts["wrong"] += 1
            failed.append(f"{call!r}: {error}"[:1000])
    return {"verdicts": dict(verdicts), "failed": failed[:5]}


def search(cases: int, seed: int, state: Path, library: Path | None, jobs: int = 1) -> dict[str, Any]:
    """Runs what the state file does not hold yet, in `jobs` processes; returns its content."""
    from adaattn_hf._files import write_atomically
    from adaattn_hf.eval.provenance import commit

    done: dict[str, Any] = json.loads(state.read_text()) if state.is_file() else {}
    if done.get("seed") != seed:
        done = {"seed": seed, "chunks": [], "verdicts": {}, "failed": [], "commits": []}
    # the last chunk of a kind is smaller; another number of cases keeps the chunks that it shares
    parts: list[list[Any]] = [
        [kind, number, min(CHUNK, (round(cases * share) or 1) - number * CHUNK)]
        for kind, share in KINDS.items()
        for number in range(-(-(round(cases * share) or 1) // CHUNK))
    ]
    asked = sorted((part for part in parts if part not in done["chunks"]), key=lambda part: int(part[1]))

    def run(part: list[Any]) -> tuple[list[Any], str | None, subprocess.CompletedProcess[str]]:
        kind, number, size = part
        command = [sys.executable, __file__, "--chunk", kind, "--seed", str(seed * 1_000_003 + number)]
        command += ["--cases", str(size), *(["--library", str(library)] if library else [])]
        here = commit(ROOT / "adaattn_hf")
        return part, here, subprocess.run(command, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, part) for part in asked]):
            part, here, ran = future.result()
            kind, number = part[:2]
            if ran.returncode:
                told = (ran.stdout + ran.stderr)[-3000:]
                found: dict[str, Any] = {
                    "verdicts": {"crashed": 1},
                    "failed": [f"chunk {number} of {kind} ended with {ran.returncode}: {told}"],
                }
            else:
                found = json.loads(ran.stdout.splitlines()[-1])
            counts = collections.Counter(done["verdicts"].get(kind, {}))
            counts.update(found["verdicts"])
            done["verdicts"][kind] = dict(counts)
            done["failed"] = (done["failed"] + found["failed"])[:50]
            done["chunks"].append(part)
            done["commits"] = list(dict.fromkeys([*done["commits"], here]))
            write_atomically(state, json.dumps(done, indent=1) + "\n")
            print(f"{kind}: {sum(counts.values())} calls, {dict(counts)}", flush=True)
    return done


def record(done: dict[str, Any], directory: Path) -> None:
    """Writes `fuzz.json` and `fuzz.md`."""
    import torch

    from adaattn_hf._files import write_atomically
    from adaattn_hf.backends.capability import cpu_name
    from adaattn_hf.backends.native.library import library

    native = library()
    assert native is not None
    found = {key: done[key] for key in ("seed", "verdicts", "failed", "commits")}
    found["native"] = [json.loads(p.read_text()) for p in sorted((ROOT / "build").glob("fuzz_*.json"))]
    found["date"] = datetime.date.today().isoformat()
    found["machine"] = f"{cpu_name()}, {native.level_name}, torch {torch.__version__}"
    write_atomically(directory / "fuzz.json", json.dumps(found, indent=1) + "\n")
    lines = [
        "# Random calls",
        "",
        "Made by `make fuzz` (`tests/property/search.py`), which goes on where it was interrupted; the numbers lie in "
        "`fuzz.json`. A malformed call is a valid one after one or two changes: wrong shapes, dtypes, strides, "
        "devices, lengths, structures, numbers. It must be refused by a sentence of the package, be refused by torch "
        "where stock attention is refused, too, or be answered as the formula has it.",
        "",
        f"Seed {found['seed']}, {found['date']}, commit {', '.join(map(str, found['commits']))}; "
        f"{found['machine']}.",
        "",
        "| calls | number | served rightly | refused in words | refused by torch, as stock is | wrong | crashed |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, words in WORDS.items():
        counts = collections.Counter(found["verdicts"].get(kind, {}))
        cells = [counts[v] for v in ("served", "refused", "refused as by stock", "wrong", "crashed")]
        lines.append(f"| {words} | {sum(counts.values())} | {' | '.join(map(str, cells))} |")
    if found["native"]:
        lines += ["", "Through the C interface alone, as many valid calls and as many malformed ones:", ""]
        lines += ["| machine | each | seed | by | date | failed |", "|---|---:|---:|---|---|---|"]
        lines += [
            f"| {' | '.join(str(one[key]) for key in ('machine', 'cases', 'seed', 'by', 'date'))} "
            f"| {', '.join(one['failed']) or 'none'} |"
            for one in found["native"]
        ]
    write_atomically(directory / "fuzz.md", "\n".join(lines) + "\n")


def main() -> int:
    """Searches; the exit code is 1 where anything was wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="valid calls, and as many malformed ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "fuzz.json")
    parser.add_argument("--write", type=Path, help="directory for fuzz.json and fuzz.md")
    parser.add_argument("--record", action="store_true", help="write what the state file holds, and stop")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each computes with one thread")
    parser.add_argument("--library", type=Path, help="directory of another build of the native kernels")
    parser.add_argument("--chunk", choices=list(KINDS), help="run one chunk in this process")
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if asked.chunk:
        print(json.dumps(chunk(asked.chunk, asked.seed, asked.cases, asked.library)))
        return 0
    if asked.record:
        done = json.loads(asked.state.read_text())
    else:
        done = search(asked.cases, asked.seed, asked.state, asked.library, asked.jobs)
    if asked.write:
        record(done, asked.write)
    for failure in done["failed"]:
        print(failure)
    return 1 if done["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
