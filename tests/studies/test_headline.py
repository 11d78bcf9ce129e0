"""The figures of the front pages are those of the results that are kept."""

from __future__ import annotations

import importlib.util
import json
from typing import Any
from xml.etree import ElementTree

import pytest

from adaattn_hf.errors import UsageError
from studies import headline
from studies.headline_frontier import frontier

from ..support.source_tree import ROOT


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_a_front_page_shows_what_the_results_hold(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert headline.rewrite(page, headline.figures(headline.kept_reports())) == page


def test_the_site_sets_the_results_beside_those_of_other_libraries() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    reports = headline.kept_reports()
    assert headline.rewrite(page, frontier(reports), "frontier") == page


def test_seeds_that_failed_are_named_and_what_is_beaten_is_not_bold() -> None:
    reports = headline.kept_reports()
    seed = next(one for one in reports["budget"]["seeds"] if one["budget"] < 2e-3)
    seed["met"] = False
    written = frontier(reports)
    assert f"keeps it on the held-out texts: {seed['seed']};" in written
    stock = next(row for row in reports["budget"]["peers"]["rows"] if row["what"] == "stock sdpa")
    assert "**stock sdpa**" in written
    reports["budget"]["peers"]["rows"].append(
        {**stock, "what": "a better one", "seconds": stock["seconds"] / 2}
    )
    again = frontier(reports)
    assert "**a better one**" in again
    assert "**stock sdpa**" not in again


def test_decode_steps_are_set_beside_the_better_of_the_two_stock_caches() -> None:
    report = headline.kept_reports()["gpu_plans"]
    cells = [cell for cell in report["sections"]["model"] if cell["cell"].startswith("decode")]
    for cell in cells:
        cell |= {"sdpa": 90.0, "sdpa, StaticCache": 30.0, "exact": 20.0}
    cells[0]["sdpa"] = 10.0
    rows = headline.steps_block(report).splitlines()[2:]
    assert [row.split(" | ")[-1] for row in rows] == ["0.50 |", *["1.50 |"] * (len(cells) - 1)]


def test_the_picture_shows_what_the_results_hold() -> None:
    reports = headline.kept_reports()
    shown = headline.PICTURE.read_text(encoding="utf-8")
    assert headline.picture(reports) == shown
    cell: dict[str, Any] = next(c for c in reports["gpu"]["cells"] if c["title"].startswith("packed 16"))
    cell["ratio_best"]["wall"]["median"] += 1
    assert headline.picture(reports) != shown


def test_the_picture_is_well_formed_and_names_every_bar() -> None:
    root = ElementTree.fromstring(headline.PICTURE.read_text(encoding="utf-8"))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    table = headline.block(headline.kept_reports()).splitlines()[2:]
    for row in table:
        says, _, _, _, ratio = (part.strip() for part in row.strip("| ").split("|"))
        assert any(text.startswith(f"{says} (") for text in texts), says
        assert ratio in texts, ratio


def test_the_picture_of_plans_shows_what_the_results_hold() -> None:
    study = headline.kept_reports()["budget"]
    shown = headline.PLANS.read_text(encoding="utf-8")
    assert headline.plans_picture(study) == shown
    first = [record for record in study["seeds"] if record["seed"] == 0]
    cells = ElementTree.fromstring(shown).findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(cells) == sum(len(record["picks"]) for record in first)
    first[0]["picks"][0] = "w777+16 bf16"
    assert ">777<" in headline.plans_picture(study)


def test_another_figure_would_show() -> None:
    reports = headline.kept_reports()
    before = headline.block(reports)
    cell: dict[str, Any] = next(c for c in reports["gpu"]["cells"] if c["title"].startswith("packed 16"))
    cell["ratio_best"]["wall"]["median"] += 1
    assert headline.block(reports) != before
    before = headline.budget_block(reports["budget"])
    reports["budget"]["seeds"][0]["met"] = not reports["budget"]["seeds"][0]["met"]
    assert headline.budget_block(reports["budget"]) != before
    before = headline.device_budget_block(reports["budget_cuda"])
    timed = reports["budget_cuda"]["speed"]
    later = timed["renewed"]["attention, 8192"]["provenance"]
    later["device"] = "another"
    assert "another" in headline.device_budget_block(reports["budget_cuda"])
    timed["attention"]["8192"]["plan-1%"]["seconds"] *= 2
    assert (after := headline.device_budget_block(reports["budget_cuda"])) != before
    timed["attention"] = dict.fromkeys(("8192", "4 x 8192"), timed["attention"]["8192"])
    timed.pop("model", None)
    alone = headline.device_budget_block(reports["budget_cuda"])
    rows = [line.split(" | ") for line in alone.splitlines()[2:]]
    assert [row[3] for row in rows] == ["1", "4"] * 2
    timed["model"] = timed["attention"]
    both = headline.device_budget_block(reports["budget_cuda"])
    # a level that was not timed has dashes in its cells: two budgets, two bases, two shapes
    assert (alone.count("| –"), both.count("| –")) == (8, 0)
    before = headline.figures(reports)
    reports["cache_plans"][0]["smaller"] += 1
    after = headline.figures(reports)
    assert after != before
    reports["quality/smollm2-plan-1-cuda-wikitext"]["quality"]["arms"][1]["perplexity"] += 1
    assert headline.figures(reports) != after


def test_what_is_missing_is_said() -> None:
    with pytest.raises(UsageError, match="without"):
        headline.rewrite("no marks", "table")
    with pytest.raises(UsageError, match="packed 8 x 512"):
        headline.block({"bench": {"cells": [], "provenance": {}}})


def test_the_page_of_cuda_backends_is_that_of_its_json() -> None:
    spec = importlib.util.spec_from_file_location(
        "bench_kernels", ROOT / "tests" / "gpu" / "bench_kernels.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    results = ROOT / "docs" / "results"
    report = json.loads((results / "gpu_kernels.json").read_text(encoding="utf-8"))
    assert (results / "gpu_kernels.md").read_text(encoding="utf-8") == script.table(report)
    report["rows"][0]["triton"] += 1
    assert (results / "gpu_kernels.md").read_text(encoding="utf-8") != script.table(report)


def test_windows_are_told_by_the_devices_of_their_own_sections() -> None:
    report = headline.kept_reports()["gpu_plans"]
    report["settings"]["prefill"] = {**report["setting"], "device": "another"}
    assert "another" in headline.plans_block(report).splitlines()[0]


def test_generation_is_told_by_its_own_section() -> None:
    """Of a report whose first section came from elsewhere, with the device of its own."""
    cell = {"sdpa": 9.0, "exact": 6.0, "plan 0.1 %": 4.5, "plan 1 %": 3.0, "sdpa, DynamicCache": 50.0}
    report = {
        "setting": {"device": "one"},
        "settings": {"generation": {"device": "another"}},
        "sections": {"generation": [{"cell": "8k tokens in a cache of 8k, ms a token", **cell}]},
    }
    head, _, row = headline.generation_block(report).splitlines()
    assert "another" in head
    assert (
        row
        == "| a token behind 8k tokens in a cache of 8k | 9.0 ms | 6.0 ms | 4.5 ms | 3.0 ms | 1.50 | 3.00 |"
    )
