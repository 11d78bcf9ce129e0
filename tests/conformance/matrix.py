"""Runs the test-suite under every pair of Python and Transformers at hand, each in a virtual environment of
its own.

    python tests/conformance/matrix.py [--pairs 3.11:5.17.0,3.11:5.23.0] [--torch 2.13.0] [-- PYTEST_ARGUMENT
    ...]
    python tests/conformance/matrix.py --ready PYTHON --record docs/results/versions.json [-- PYTEST_ARGUMENT ...]

`--ready` runs in an environment that is set up already; `--record` keeps what came of it, for table.py.

A pair whose interpreter is absent, or for which the package index has no wheel, is reported as such. The exit
status is that of the pairs that ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAIRS = "3.10:5.17.0,3.11:5.17.0,3.11:5.18.0,3.11:5.23.0,3.12:5.23.0,3.13:5.23.0"


class Outcome(NamedTuple):
    """How a pair went: `passed`, `failed` or `absent`, and the last line that says so."""

    status: str
    line: str


def last_line(text: str) -> str:
    """Returns the last line that holds anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def install(python: Path, transformers: str, torch: str | None) -> str | None:
    """Installs the project with one version of Transformers; returns why it could not be done, or None."""
    wanted = ["torch" if torch is None else f"torch=={torch}", f"transformers=={transformers}"]
    cpu = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    for packages in (
        [*wanted, *cpu],
        [*wanted, "setuptools>=77", "wheel"],
        ["--no-build-isolation", "-e", ".[dev]", *wanted],
    ):
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "-q", *packages],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            return last_line(done.stderr)
    return None


def run(pair: str, torch: str | None, arguments: list[str]) -> Outcome:
    """Returns how the suite went for `PYTHON:TRANSFORMERS`."""
    version, _, transformers = pair.partition(":")
    found = shutil.which(f"python{version}")
    if found is None:
        return Outcome("absent", f"python{version} is not on the path")
    home = ROOT / "build" / "matrix" / pair.replace(":", "-")
    python = home / "bin" / "python"
    if not python.exists():
        made = subprocess.run([found, "-m", "venv", str(home)], capture_output=True, text=True, check=False)
        if made.returncode:
            return Outcome("absent", last_line(made.stderr + made.stdout))
    refusal = install(python, transformers, torch)
    if refusal is not None:
        return Outcome("absent", refusal)
    # the script, and not `python -m`, which would put the checkout in front of the installed package
    command = [str(home / "bin" / "pytest"), "-q", *(arguments or ["tests"])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", flush=True)
    return Outcome("failed" if done.returncode else "passed", last_line(done.stdout))


def counts(line: str) -> dict[str, int]:
    """Returns outcome -> number of pytest's last line."""
    return {
        name.rstrip("s"): int(number)
        for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", line)
    }


def ready(python: str, label: str | None, arguments: list[str], record: Path) -> Outcome:
    """Returns how pytest went in an environment as it is, and keeps it under its versions and `label`."""
    asked = (
        "import json, platform, torch, transformers as t; v = [platform.python_version(), torch.__version__]"
    )
    said = subprocess.run(
        [python, "-c", f"{asked}; print(json.dumps([*v, t.__version__]))"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    versions = json.loads(last_line(said.stdout))
    command = [python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or ["tests"])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", flush=True)
    line = last_line(done.stdout)
    kept = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    row = kept.setdefault(
        " ".join(versions), dict(zip(("python", "torch", "transformers"), versions, strict=True))
    )
    for part in [label] if label else arguments or ["tests"]:
        row.setdefault("runs", {}).pop(part, None)
    row.setdefault("runs", {})[label or " ".join(arguments or ["tests"])] = counts(line)
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, record)
    return Outcome("failed" if done.returncode else "passed", line)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default=PAIRS, help="PYTHON:TRANSFORMERS, separated by commas")
    parser.add_argument("--torch", help="version of torch; the newest that fits when absent")
    parser.add_argument("--ready", metavar="PYTHON", help="interpreter of an environment that is set up")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "versions.json")
    parser.add_argument("--label", help="what the tests are called in the record; their paths when absent")
    parser.add_argument("arguments", nargs="*", help="arguments of pytest")
    args = parser.parse_args()
    if args.ready:
        outcome = ready(args.ready, args.label, args.arguments, args.record)
        print(outcome.status, outcome.line, flush=True)
        sys.exit(int(outcome.status == "failed"))
    outcomes = {}
    for pair in args.pairs.split(","):
        began = time.monotonic()
        outcomes[pair] = run(pair, args.torch, args.arguments)
        status, line = outcomes[pair]
        print(f"{pair:14} {status:7} {time.monotonic() - began:6.0f} s  {line}", flush=True)
    sys.exit(int(any(outcome.status == "failed" for outcome in outcomes.values())))


if __name__ == "__main__":
    main()
