"""`make` finds a Python that serves, and torch for it, on machines unlike this one: fakes on a PATH of their own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.source_tree import ROOT
from .test_metadata import pythons

TOOLS = ("bash", "cat", "dirname", "head", "make", "mktemp", "rm", "sed", "sh", "sleep", "tr")
OTHER = """#!/bin/sh
exec {real} -I -c '
import sys
sys.version_info = {version}
for name in {without}: sys.modules[name] = None
exec(sys.argv[1])' "$2"
"""
SHIM = """#!/bin/sh
echo "pyenv: python3.13: command not found" >&2
echo "The command exists in these versions" >&2
exit 127
"""
PIP = """#!/bin/sh
if test "$1" = -c; then exec {real} -I -c '
import sys
sys.version_info = {version}
exec(sys.argv[1])' "$2"; fi
pins=$6
shift 6
echo "$* | $(sed -n 's/^triton==.*/triton pinned/p; s/^numpy==.*/numpy pinned/p' "$pins" | tr '\\n' ' ')" >> {log}
case "$*" in {refused}) echo "no such build" >&2; exit 1;; esac
"""
"""An interpreter of a virtual environment: writes down what pip is asked for, and refuses some of it."""


def tool(place: Path, name: str, text: str) -> None:
    (place / name).write_text(text)
    (place / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "bin"
    place.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not installed")
        if name == "sleep":  # one that lives on would hold the script's output open for its five seconds
            tool(place, name, f"#!/bin/sh\nexec {found} 0.05\n")
        else:
            (place / name).symlink_to(found)
    return place


def other(version: tuple[int, int], *without: str) -> str:
    return OTHER.format(real=sys.executable, version=(*version, 0), without=json.dumps(without))


def run(path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={"PATH": str(path)}, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize(("pythons", "picked"), [
    ({"python3.11": other((3, 11)), "python3": other((3, 11))}, "python3.11"),
    ({"python3.11": other((3, 11)), "python3.12": other((3, 12)), "python3.14": other((3, 14))}, "python3.14"),
    ({"python3.13": SHIM, "python3.12": other((3, 12), "ensurepip"), "python3.11": other((3, 11))}, "python3.11"),
    ({"python3.11": other((3, 10)), "python3": other((3, 12))}, "python3"),
])  # fmt: skip
def test_the_first_python_that_serves_is_taken(pythons: dict[str, str], picked: str, path: Path) -> None:
    for name, text in pythons.items():
        tool(path, name, text)
    assert run(path, ".ci/find-python").stdout == f"{picked}\n"
    shown = run(path, "make", "-n", "venv", "VENV=elsewhere").stdout.splitlines()
    assert shown[:2] == [f"{picked} -m venv elsewhere", ".ci/fill-venv elsewhere/bin/python"]
    assert run(path, "make", "-n", "venv", "VENV=elsewhere", "PYTHON=mine").stdout.startswith("mine -m venv elsewhere")


def test_where_none_serves_each_is_named_with_what_it_lacks(path: Path) -> None:
    tool(path, "python3.13", SHIM)
    tool(path, "python3.12", other((3, 12), "venv"))
    tool(path, "python3", other((3, 10)))
    for done in (run(path, ".ci/find-python"), run(path, "make", "venv", "VENV=elsewhere")):
        assert done.returncode != 0
        assert "no Python 3.11 to 3.14 with venv and pip on PATH" in done.stderr
        assert "python3.13: pyenv: python3.13: command not found\n" in done.stderr
        assert "python3.12: is without venv (Debian: apt install python3.12-venv)\n" in done.stderr
        assert "python3: is Python 3.10\n" in done.stderr
        assert "make PYTHON=/path/to/python" in done.stderr
    assert not (ROOT / "elsewhere").exists()
    assert "on PATH: none at all" in run(path.parent, str(path / "sh"), ".ci/find-python").stderr


def test_an_environment_that_is_there_asks_for_no_python(path: Path, tmp_path: Path) -> None:
    (tmp_path / "ready" / "bin").mkdir(parents=True)
    tool(tmp_path / "ready" / "bin", "python", "")
    shown = run(path, "make", "-n", "venv", f"VENV={tmp_path / 'ready'}")
    assert shown.stdout.splitlines()[0] == f".ci/fill-venv {tmp_path / 'ready' / 'bin' / 'python'}"


def test_the_versions_that_serve_are_those_of_the_classifiers() -> None:
    declared = pythons()
    script = (ROOT / ".ci" / "find-python").read_text(encoding="utf-8")
    bounds = [f"({version.replace('.', ', ')})" for version in (declared[0], declared[-1])]
    assert f"if not {bounds[0]} <= sys.version_info[:2] <= {bounds[1]}:" in script
    names = " ".join(f"python{version}" for version in reversed(declared))
    assert f"for name in {names} python3; do" in script


def filled(
    path: Path, system: str, version: tuple[int, int], refused: str, *package: str
) -> tuple[list[str], str, int]:
    """What pip was asked for, in order, what was said, and the exit code."""
    log = path.parent / "log"
    log.touch()
    tool(path, "uname", f"#!/bin/sh\necho {system}\n")
    tool(path, "python", PIP.format(real=sys.executable, version=(*version, 0), log=log, refused=refused))
    done = run(path, ".ci/fill-venv", str(path / "python"), *package)
    return [" ".join(line.split()) for line in log.read_text().splitlines()], done.stderr, done.returncode


PINS = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8")
TORCH = PINS.partition("\ntorch==")[2].partition("\n")[0]
ALL = "| numpy pinned triton pinned"
REST = ["setuptools wheel", "--no-build-isolation -e .[dev,docs]"]
OF_PYTORCH = "--extra-index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("refused", "tried"),
    [
        ("nothing", [f"torch=={TORCH}+cpu"]),
        (f'"torch=={TORCH}+cpu"', [f"torch=={TORCH}+cpu", f"torch=={TORCH}+cpu {OF_PYTORCH}"]),
    ],
)
def test_the_cpu_build_of_torch_is_taken_from_where_it_is(refused: str, tried: list[str], path: Path) -> None:
    asked, _, code = filled(path, "Linux", (3, 12), refused)
    assert (asked, code) == ([f"{what} {ALL}" for what in (*tried, *REST)], 0)


def test_without_a_cpu_build_the_plain_one_is_taken_with_the_triton_that_it_brings(path: Path) -> None:
    asked, said, code = filled(path, "Linux", (3, 13), "*+cpu*")
    tried = [f"torch=={TORCH}+cpu {ALL}", f"torch=={TORCH}+cpu {OF_PYTORCH} {ALL}"]
    assert (asked, code) == ([*tried, *(f"{what} | numpy pinned" for what in (f"torch=={TORCH}", *REST))], 0)
    assert "no CPU build for this Python; taking the plain build" in said


def test_elsewhere_than_on_linux_the_plain_build_is_the_cpu_build(path: Path) -> None:
    asked, _, code = filled(path, "Darwin", (3, 12), "nothing")
    assert (asked, code) == ([f"{what} | numpy pinned" for what in (f"torch=={TORCH}", *REST)], 0)


def test_the_demo_gets_an_environment_without_tools(path: Path) -> None:
    shown = run(path, "make", "-Bn", "demo", "PYTHON=mine").stdout.splitlines()
    assert (shown[-3], shown[-1]) == (".ci/fill-venv .venv-demo/bin/python .", ".venv-demo/bin/adaattn eval")
    asked, _, code = filled(path, "Linux", (3, 12), "nothing", ".")
    assert (asked[-1], code) == (f"--no-build-isolation -e . {ALL}", 0)


def test_where_no_torch_is_to_be_had_this_is_said(path: Path) -> None:
    asked, said, code = filled(path, "Linux", (3, 13), "torch*")
    assert (len(asked), code) == (3, 1)
    assert f"torch {TORCH} is not to be had for Python 3.13 here: pip's reasons are above" in said
    assert "no such build" in said
