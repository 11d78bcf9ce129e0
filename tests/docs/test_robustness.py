"""The page of faults names tests that exist, and every fault that was found."""

import ast
import functools
import re
from pathlib import Path

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FOUND = 30
SECOND = [*(f"A{number}" for number in range(1, 13)), *(f"B{number}" for number in range(1, 15))]
"""Rows of the second attack."""


@functools.cache
def functions_of(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def missing(page: str, root: Path) -> list[str]:
    return [f"{file}::{name}" for file, name in NAMED.findall(page) if name not in functions_of(root / file)]


def test_every_fault_has_a_test_that_exists(checkout: Path) -> None:
    page = (checkout / "docs" / "robustness.md").read_text(encoding="utf-8")
    first, later = page.split("## Found later\n")
    assert len(NAMED.findall(first)) == FOUND
    assert NAMED.findall(later)
    assert unnamed(page) == []
    assert missing(page, checkout) == []


def unnamed(page: str) -> list[str]:
    second, held = page.split("## The second attack\n")[1].split("## What held\n")
    rows = {row.split("|")[1].strip(): row for row in second.splitlines() if row.startswith("| ")}
    lost = [fault for fault in SECOND if not NAMED.search(rows.get(fault, ""))]
    kept = [row for row in held.split("\n## ")[0].splitlines() if row.startswith("| ")][1:]
    return lost + [row for row in kept if not NAMED.search(row)]


def test_a_row_without_a_test_is_noticed(checkout: Path) -> None:
    page = (checkout / "docs" / "robustness.md").read_text(encoding="utf-8")
    assert unnamed(re.sub(r"(?m)^\| A7 .*$", "| A7 | x | y | z |", page)) == ["A7"]
    assert unnamed(re.sub(r"(?m)^\| full disks .*$", "| full disks | |", page)) == ["| full disks | |"]


def test_a_test_that_is_gone_is_noticed(checkout: Path) -> None:
    gone = "`tests/docs/test_robustness.py::test_that_nobody_wrote` `tests/nowhere.py::test_x`"
    assert len(missing(gone, checkout)) == 2
