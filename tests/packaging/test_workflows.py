"""The workflows: what they call exists, actions are pinned, permissions are small, the suite runs once per event."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..support.source_tree import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")
"""A tag can be moved to other code, a commit cannot; the tag stands beside it for people and Dependabot."""
WHOLE_SUITE = re.compile(r"make (test|cover)\b|pytest [^\n]*\btests( |$)")


def read(path: Path) -> dict[str, Any]:
    parsed: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    parsed["on"] = parsed.pop(True, parsed.get("on"))
    return parsed


def combinations(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What a job's matrix comes to: one dictionary per run of the job."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    runs: list[dict[str, Any]] = [{}]
    included = matrix.pop("include", [])
    for key, values in matrix.items():
        runs = [{**run, key: value} for run in runs for value in values]
    return [*(runs if matrix or not included else []), *included]


def commands(workflow: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Job and every command line that it runs, with its matrix filled in."""
    for name, job in workflow["jobs"].items():
        for combination in combinations(job):
            for step in job.get("steps", ()):
                filled = lambda m, c=combination: str(c.get(m[1], ""))  # noqa: E731
                yield name, re.sub(r"\${{ matrix\.(\w+) }}", filled, step.get("run", ""))


def findings(workflow: dict[str, Any]) -> Iterator[str]:
    if "permissions" not in workflow:
        yield "no permissions: the token may do everything"
    for name, job in workflow["jobs"].items():
        uses = [job["uses"]] if "uses" in job else [step["uses"] for step in job["steps"] if "uses" in step]
        for action in uses:
            if not action.startswith("./") and not PINNED.fullmatch(action):
                yield f"{name}: {action} is not pinned to a commit"
            if action.startswith("./") and not (ROOT / action).is_file():
                yield f"{name}: {action} does not exist"
        for step in job.get("steps", ()):
            kept = step.get("with", {}).get("persist-credentials", True)
            if step.get("uses", "").startswith("actions/checkout@") and kept:
                yield f"{name}: checkout leaves its token to later steps; persist-credentials: false"
    for name, line in commands(workflow):
        for target in re.findall(r"\bmake ([a-z0-9-]+)", line):
            if target not in TARGETS:
                yield f"{name}: make {target} does not exist"
        for script in re.findall(r"python (?:-P )?([\w/]+\.py)", line):
            if not (ROOT / script).is_file():
                yield f"{name}: {script} does not exist"


def suite_runs(workflows: list[dict[str, Any]], event: str) -> list[str]:
    return [
        f"{workflow['name']}/{name}" for workflow in workflows if event in workflow["on"]
        for name, line in commands(workflow) if WHOLE_SUITE.search(line)
    ]  # fmt: skip


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nothing_is_wrong_with_a_workflow(path: Path) -> None:
    assert list(findings(read(path))) == []


@pytest.mark.parametrize(
    ("job", "finding"),
    [
        ({"steps": [{"uses": "actions/cache@main"}]}, "not pinned"),
        ({"steps": [{"uses": "actions/cache@v4"}]}, "not pinned"),
        ({"steps": [{"uses": f"actions/checkout@{40 * '0'}"}]}, "leaves its token"),
        ({"uses": "./.github/workflows/absent.yml"}, "does not exist"),
        ({"steps": [{"run": "make tset"}]}, "make tset does not exist"),
        ({"steps": [{"run": "make ${{ matrix.t }}"}], "strategy": {"matrix": {"t": ["lint", "lnit"]}}}, "make lnit"),
        ({"steps": [{"run": "python tests/absent.py"}]}, "tests/absent.py does not exist"),
    ],
)
def test_what_is_wrong_is_found(job: dict[str, Any], finding: str) -> None:
    found = list(findings({"name": "planted", "on": {"push": None}, "permissions": {}, "jobs": {"one": job}}))
    assert len(found) == 1
    assert finding in found[0]
    assert "no permissions" in next(findings({"jobs": {}}))


@pytest.mark.parametrize("event", ["push", "pull_request"])
def test_the_suite_runs_once_per_change(event: str) -> None:
    assert suite_runs([read(path) for path in WORKFLOWS], event) == ["ci/check"]


def test_a_second_run_of_the_suite_is_found() -> None:
    workflow = read(ROOT / ".github" / "workflows" / "ci.yml")
    workflow["jobs"]["again"] = {"steps": [{"run": "make test"}]}
    assert len(suite_runs([workflow], "push")) == 2


def test_publishing_keeps_no_password() -> None:
    release = read(ROOT / ".github" / "workflows" / "release.yml")
    assert release["jobs"]["publish"]["permissions"]["id-token"] == "write"
    assert "password" not in (ROOT / ".github" / "workflows" / "release.yml").read_text().replace("no password", "")
    assert "secrets." not in str(release)


def test_a_release_says_what_it_brings() -> None:
    release, wheels = (read(ROOT / ".github" / "workflows" / f"{name}.yml") for name in ("release", "wheels"))
    assert any("make sbom" in line for _, line in commands(wheels))
    steps = release["jobs"]["publish"]["steps"]
    (attested,) = [step["with"]["subject-path"] for step in steps if "attest" in step.get("uses", "")]
    assert attested.split() == ["dist/*", "sbom/*"]
    assert any("sbom/*" in step.get("run", "") for step in steps)


def test_recipes_find_modules_that_only_the_checkout_has() -> None:
    """Under PYTHONSAFEPATH, which the Makefile exports, `python -m studies.…` finds nothing."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert "export PYTHONSAFEPATH := 1" in lines
    runs = [line for line in lines if " -m studies." in line]
    assert runs
    assert all(line.startswith("\tPYTHONSAFEPATH= ") for line in runs)
