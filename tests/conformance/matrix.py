"""Runs the test-suite under every pair of Python and Transformers at hand, each in an environment of its own.

    python tests/conformance/matrix.py [--pairs 3.11:5.17.0,3.11:5.24.0] [--torch 2.13.0] [-- PYTEST_ARGUMENT ...]
    python tests/conformance/matrix.py --engine
    python tests/conformance/matrix.py --lowest
    python tests/conformance/matrix.py --ready PYTHON --record docs/results/versions.json [-- PYTEST_ARGUMENT ...]

`--engine` runs those of continuous batching under the versions between, whose engines differ. `--lowest` runs the tests
of the core with the lowest torch and Transformers that pyproject.toml names. `--ready` runs in an environment that is
set up already; `--record` keeps what came of it, for table.py.

A pair whose interpreter is absent, or for which the package index has no wheel, is reported as such. The exit
status is that of the pairs that ran.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAIRS = "3.11:5.17.0,3.11:5.18.0,3.11:5.24.0,3.12:5.24.0,3.13:5.24.0,3.14:5.24.0"

BETWEEN = ",".join(f"3.11:5.{minor}.0" for minor in (19, 20, 21, 22, 23))
"""Whose engines of continuous batching are not those of `PAIRS`."""
ENGINE = ["tests/model/test_batching.py", "tests/model/test_versions.py"]
TOOLS = ["accelerate", "hypothesis", "matplotlib", "packaging", "pillow", "psutil", "pytest", "pytest-xdist"]
"""What the tests of the core need beside the package; the linter and the studies want a newer Triton."""
SAME = (
    "contracts/test_gpu_required", "contracts/test_import_direction", "contracts/test_kernel_sources",
    "contracts/test_model_knowledge", "contracts/test_source", "contracts/test_writers", "unit/test_fixed_order",
    "unit/test_options", "unit/test_plan_page", "unit/test_policy", "unit/test_texts",
)  # fmt: skip
"""Tests of the source and of numbers, which come out alike under every torch and Transformers."""
KINDS = ("test_plugin_*", "test_plan_*", "test_use_plan*", "test_breadth*", "test_generation*", "test_compile*")
CORE = ["-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "tests/unit", "tests/contracts",
    *(f"--ignore=tests/{name}.py" for name in SAME),
    *sorted(f"tests/model/{path.name}" for kind in KINDS for path in (ROOT / "tests" / "model").glob(f"{kind}.py")),
]  # fmt: skip


class Outcome(NamedTuple):
    """How a pair went: `passed`, `failed` or `absent`, and the last line that says so."""

    status: str
    line: str


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def lowest(package: str) -> str:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    found = (re.match(rf"{package}\s*>=\s*([0-9.]+)", one) for one in named)
    return next(match[1] for match in found if match)


def ran(command: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=check)


def tested(command: list[str]) -> Outcome:
    done = ran(command)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", flush=True)
    return Outcome("failed" if done.returncode else "passed", last_line(done.stdout))


def install(python: Path, transformers: str, torch: str | None, tools: list[str]) -> str | None:
    """Installs the project with one version of Transformers; returns why it could not be done, or None."""
    wanted = ["torch" if torch is None else f"torch=={torch}", f"transformers=={transformers}"]
    # where the second index cannot be reached pip goes on with the first
    cpu = ["--extra-index-url", "https://download.pytorch.org/whl/cpu", "--retries", "0", "--timeout", "3"]
    for packages in ([*wanted, *cpu], [*wanted, "setuptools>=77", "wheel"], ["--no-build-isolation", *tools, *wanted]):
        done = ran([str(python), "-m", "pip", "install", "-q", *packages])
        if done.returncode:
            return last_line(done.stderr)
    return None


def run(pair: str, torch: str | None, arguments: list[str], tools: Sequence[str] = ("-e", ".[dev]")) -> Outcome:
    version, _, transformers = pair.partition(":")
    found = shutil.which(f"python{version}")
    if found is None:
        return Outcome("absent", f"python{version} is not on the path")
    home = ROOT / "build" / "matrix" / pair.replace(":", "-")
    python = home / "bin" / "python"
    if not python.exists():
        made = ran([found, "-m", "venv", str(home)])
        if made.returncode:
            return Outcome("absent", last_line(made.stderr + made.stdout))
    refusal = install(python, transformers, torch, list(tools))
    if refusal is not None:
        return Outcome("absent", refusal)
    # the script, and not `python -m`, which would put the checkout in front of the installed package
    return tested([str(home / "bin" / "pytest"), "-q", *(arguments or ["tests"])])


def counts(line: str) -> dict[str, int]:
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?)", line)
    return {name.rstrip("s"): int(number) for number, name in found}


def ready(python: str, label: str | None, arguments: list[str], record: Path) -> Outcome:
    """Returns how pytest went in an environment as it is, and keeps it under its versions and `label`."""
    program = "import json, platform, torch, transformers as t; v = [platform.python_version(), torch.__version__]"
    said = ran([python, "-c", f"{program}; print(json.dumps([*v, t.__version__]))"], check=True)
    versions = json.loads(last_line(said.stdout))
    outcome = tested([python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *(arguments or ["tests"])])
    kept = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    row = kept.setdefault(" ".join(versions), dict(zip(("python", "torch", "transformers"), versions, strict=True)))
    parts = [argument for argument in arguments if argument.startswith("tests")] or ["tests"]
    for part in [label] if label else parts:
        row.setdefault("runs", {}).pop(part, None)
    commit = ran(["git", "rev-parse", "HEAD"], check=True).stdout.strip()
    row.setdefault("runs", {})[label or " ".join(parts)] = {**counts(outcome.line), "commit": commit}
    temporary = record.with_suffix(".tmp")
    temporary.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, record)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", default=PAIRS, help="PYTHON:TRANSFORMERS, separated by commas")
    parser.add_argument("--torch", help="version of torch; the newest that fits when absent")
    parser.add_argument("--engine", action="store_true", help="continuous batching under the versions between")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions, and the core's tests")
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
    pairs, torch, given = args.pairs, args.torch, (args.arguments,)
    if args.lowest:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        pairs, torch = f"{python}:{lowest('transformers')}", lowest("torch")
        given = (args.arguments or CORE, ("-e", ".", *TOOLS))
    if args.engine:
        pairs, given = args.pairs if args.pairs != PAIRS else BETWEEN, (args.arguments or ENGINE,)
    for pair in pairs.split(","):
        began = time.monotonic()
        outcomes[pair] = run(pair, torch, *given)
        status, line = outcomes[pair]
        print(f"{pair:14} {status:7} {time.monotonic() - began:6.0f} s  {line}", flush=True)
    sys.exit(int(any(outcome.status == "failed" for outcome in outcomes.values())))


if __name__ == "__main__":
    main()
