"""The README's figures are those of the results that are kept."""

from __future__ import annotations

from typing import Any

import pytest

from adaattn_hf.eval import headline
from adaattn_hf.eval.errors import UsageError

from ..support.source_tree import ROOT


def test_the_readme_shows_what_the_results_hold() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert headline.rewrite(page, headline.figures(headline.reports_beside(ROOT / "README.md"))) == page


def test_another_figure_would_show() -> None:
    reports = headline.reports_beside(ROOT / "README.md")
    before = headline.block(reports)
    cell: dict[str, Any] = next(c for c in reports["gpu"]["cells"] if c["title"].startswith("packed 16"))
    cell["ratio_best"]["wall"]["median"] += 1
    assert headline.block(reports) != before
    before = headline.budget_block(reports["budget"])
    reports["budget"]["seeds"][0]["met"] = not reports["budget"]["seeds"][0]["met"]
    assert headline.budget_block(reports["budget"]) != before


def test_what_is_missing_is_said() -> None:
    with pytest.raises(UsageError, match="without"):
        headline.rewrite("no marks", "table")
    with pytest.raises(UsageError, match="packed 8 x 512"):
        headline.block({"bench": {"cells": [], "provenance": {}}})
