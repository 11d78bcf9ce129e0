"""A long random search through the package's own faces: `make fuzz CASES=100000`.

Valid calls are compared with the reference in double precision, forward and backward, whole tiny models with stock
attention. Malformed ones must be refused in words or be answered as the formula has it. Work goes in chunks, each in a
process of its own, so that a crash is an observation and not the end; what is done is kept in a state file, and the
same command goes on from there. The record of what was done is written to `--write`, at the end or alone by `--record`.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the other tests
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.property.searching.kinds import KINDS, chunk  # noqa: E402
from tests.property.searching.page import record  # noqa: E402


def parts_of(kinds: Sequence[str], cases: int) -> list[list[Any]]:
    """Kind, number and size of every chunk, the first ones of all kinds first.

    The last chunk of a kind is smaller; another number of cases keeps the chunks that it shares.
    """
    parts: list[list[Any]] = []
    for kind in kinds:
        share, size, _ = KINDS[kind]
        whole = round(cases * share) or 1
        parts += [[kind, number, min(size, whole - number * size)] for number in range(-(-whole // size))]
    return sorted(parts, key=lambda part: int(part[1]))


def search(
    cases: int, seed: int, state: Path, library: Path | None, jobs: int = 1, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, Any]:
    from adaattn_hf._files import write_atomically
    from adaattn_hf.eval.provenance import commit

    done: dict[str, Any] = json.loads(state.read_text()) if state.is_file() else {}
    if done.get("seed") != seed:
        done = {"seed": seed, "chunks": [], "verdicts": {}, "failed": [], "commits": []}
    asked = [part for part in parts_of(kinds, cases) if part not in done["chunks"]]

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="valid calls, and as many malformed ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "fuzz.json")
    parser.add_argument("--write", type=Path, help="directory for fuzz.json and fuzz.md")
    parser.add_argument("--record", action="store_true", help="write what the state file holds, and stop")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each computes with one thread")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="search these alone")
    parser.add_argument("--library", type=Path, help="directory of another build of the native kernels")
    parser.add_argument("--chunk", choices=list(KINDS), help="run one chunk in this process")
    asked = parser.parse_args()
    if asked.chunk:
        print(json.dumps(chunk(asked.chunk, asked.seed, asked.cases, asked.library)))
        return 0
    if asked.record:
        done = json.loads(asked.state.read_text())
    else:
        done = search(asked.cases, asked.seed, asked.state, asked.library, asked.jobs, asked.kinds)
    if asked.write:
        record(done, asked.write)
    for failure in done["failed"]:
        print(failure)
    return 1 if done["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
