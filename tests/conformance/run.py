"""Runs Transformers' model tests twice per family, with stock `sdpa` and with adaattn in its place.

    python tests/conformance/run.py --suite DIR --results DIR [FAMILY ...]

One file per family and implementation; what is there already is not run again, so that a run can be resumed.
Each family runs in a process of its own, forked from a server that has imported torch and Transformers once.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
LISTED: dict[str, str] = yaml.safe_load((HERE / "families.yaml").read_text(encoding="utf-8"))
WITHOUT_STOCK_SDPA = LISTED.pop("without stock sdpa").split()

PRELOAD = ["torch", "transformers.testing_utils", "transformers.trainer", "pytest", "parameterized"]


def one(suite: str, family: str, name: str, partial: str, selection: str) -> None:
    os.environ.update(
        CONFORMANCE_NAME=name, CONFORMANCE_FORCE="1" if name != "sdpa" and family in WITHOUT_STOCK_SDPA else "0",
        CONFORMANCE_RESULTS=partial, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    os.chdir(suite)
    log = os.open(f"{partial}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import pytest

    home = Path("tests/models", family)
    files = sorted(str(p) for name in ("test_modeling_*.py", "declared_*.py") for p in home.glob(name))
    options = ["-q", "--no-header", "--tb=short", "-p", "substitute", "-k", selection, "-c", "pytest.ini"]
    sys.exit(int(pytest.main([*options, *files])))


def merged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per test, with the worst outcome of its reports: subtests report for themselves."""
    rank = ("skipped", "passed", "error", "failed")
    tests: dict[str, dict[str, Any]] = {}
    for line in lines:
        known = tests.get(line["test"])
        if known is None or rank.index(line["outcome"]) > rank.index(known["outcome"]):
            tests[line["test"]] = {**line, "calls": max(line["calls"], known["calls"] if known else 0)}
    return list(tests.values())


def run(suite: Path, results: Path, family: str, name: str, selection: str, limit_s: float, commit: str | None) -> Path:
    """Returns the result file of one family and implementation, and runs the tests if it is not there yet."""
    target = results / f"{family}.{name}.json"
    if target.exists():
        return target
    partial = results / f"{family}.{name}.partial"
    partial.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    child = context.Process(target=one, args=(str(suite), family, name, str(partial), selection))
    began = time.monotonic()
    child.start()
    child.join(limit_s)
    late = child.is_alive()
    if late:
        child.kill()
        child.join()
    lines = partial.read_text().splitlines() if partial.exists() else []
    content = {
        "family": family, "implementation": name, "exit": "timeout" if late else child.exitcode,
        "seconds": round(time.monotonic() - began, 1),
        "versions": {p: metadata.version(p) for p in ("transformers", "torch", "adaattn-hf")}, "commit": commit,
        "tests": merged([json.loads(line) for line in lines]),
    }  # fmt: skip
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, target)
    partial.unlink(missing_ok=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="directories under tests/models; all of families.yaml by default")
    parser.add_argument("--suite", type=Path, default=os.environ.get("ADAATTN_CONFORMANCE"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=600, help="seconds per family and implementation")
    args = parser.parse_args()
    if args.suite is None or not (Path(args.suite) / "tests" / "models").is_dir():
        parser.error(f"--suite or ADAATTN_CONFORMANCE: got {args.suite}, expected what prepare.py makes")
    # not above: the children, stock attention's too, import this module
    import adaattn_hf
    from adaattn_hf.eval.provenance import commit

    made = commit(Path(adaattn_hf.__file__).parent)
    selection = " ".join((HERE / "selection.txt").read_text().split())
    args.results.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(args.suite), str(HERE), os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = [str(args.suite), str(HERE)]
    for family in args.families or [n for names in LISTED.values() for n in names.split()]:
        if not (Path(args.suite) / "tests" / "models" / family).is_dir():
            print(f"{family}: no tests in the suite", flush=True)
            continue
        for name in ("sdpa", "adaattn"):
            file = run(args.suite, args.results.resolve(), family, name, selection, args.limit, made)
            content = json.loads(file.read_text())
            outcomes = [t["outcome"] for t in content["tests"]]
            counts = ", ".join(f"{outcomes.count(o)} {o}" for o in ("passed", "failed", "error", "skipped"))
            ended = f"({content['seconds']} s, exit {content['exit']})"
            print(f"{family:24s} {name:8s} {counts}  {ended}", flush=True)
            if name != "sdpa":
                for test in content["tests"]:
                    if test["outcome"] in ("failed", "error"):
                        print(f"    {test['test']}: {test['why']}", flush=True)


if __name__ == "__main__":
    main()
