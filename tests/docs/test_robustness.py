"""The page of faults names tests that exist, and as many faults as the first attack found."""

from __future__ import annotations

import ast
import re
from pathlib import Path

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FOUND = 30


def missing(page: str, root: Path) -> list[str]:
    """Tests that a page names and nobody wrote."""
    lost = []
    for file, name in NAMED.findall(page):
        path = root / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.parse("")
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
            lost.append(f"{file}::{name}")
    return lost


def test_every_fault_has_a_test_that_exists(checkout: Path) -> None:
    page = (checkout / "docs" / "robustness.md").read_text(encoding="utf-8")
    first, later = page.split("## Found later\n")
    assert len(NAMED.findall(first)) == FOUND
    assert NAMED.findall(later)
    assert missing(page, checkout) == []


def test_a_test_that_is_gone_is_noticed(checkout: Path) -> None:
    gone = "`tests/docs/test_robustness.py::test_that_nobody_wrote` `tests/nowhere.py::test_x`"
    assert len(missing(gone, checkout)) == 2
