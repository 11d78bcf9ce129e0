"""Every environment variable of this project stands in one table."""

import re
from collections.abc import Iterator
from pathlib import Path

VARIABLE = re.compile(r"\bADAATTN_[A-Z][A-Z_]*\b")


def read_in(checkout: Path) -> Iterator[Path]:
    for room in ("adaattn_hf", "adaattn_cli", "patches", "eval", "tests", "hub", "studies"):
        yield from (checkout / room).rglob("*.py")
    yield checkout / "Makefile"


def described(checkout: Path) -> set[str]:
    page = (checkout / "docs" / "tuning.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## Environment variables")
    return set(VARIABLE.findall(table.partition("\n## ")[0]))


def test_the_table_has_all_that_the_source_names(checkout: Path) -> None:
    named = {
        name
        for path in read_in(checkout)
        if path != Path(__file__)
        for name in VARIABLE.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) >= 5
    assert named == described(checkout)
