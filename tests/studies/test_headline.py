"""The figures of the README, its pictures and docs/figures.md are those of the kept results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
from studies.headline_frontier import frontier

from adaattn_hf.errors import UsageError
from studies import headline, headline_peers, headline_tables
from studies.budget.report import inside

from ..support.source_tree import ROOT

Reports = dict[str, Any]


@pytest.fixture
def reports() -> Reports:
    return headline.kept_reports()


def test_every_file_shows_what_the_results_hold(reports: Reports) -> None:
    written = headline.written(reports)
    names = {path.name for path in written}
    assert names >= {"README.md", "figures.md", "speed.svg", "badge_python.svg"}
    stale = [path.name for path, text in written.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "make headline"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_has_at_most_eight_bars_and_names_each(reports: Reports) -> None:
    shown = texts(headline.picture(reports))
    assert len(headline.SHOWN) <= 8
    for case in headline.SHOWN:
        assert case.says in shown
        assert headline.times(headline.found(case, reports)[0]) in shown


def test_every_figure_of_the_table_of_gains_is_in_the_picture(reports: Reports) -> None:
    figures = re.findall(r"\*\*([\d.]+)\*\*", headline.gains(reports))
    assert len(figures) == 7
    assert set(figures) <= set(texts(headline.picture(reports)))
    assert len(re.findall(r"\]\(docs/guides/", headline.gains(reports))) == 6


def test_peers_are_timed_refuse_or_have_their_reason(reports: Reports) -> None:
    text = headline_peers.peers(reports)
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()[2:] if line.startswith("|")]
    rows = {way.strip("`"): figures for way, *figures in lines}
    assert set(rows) >= {"eager", "sdpa", "flex_attention"}
    assert all(float(figure) > 1 for figure in rows["sdpa"])
    assert rows["sdpa:flash"][-1] == "refuses"
    untimed = [name.strip(" `") for line in text.splitlines()[-8:] for name in line.rpartition(":")[2].split(",")]
    assert set(untimed) >= {"flash_attention_2", *headline_peers.UNTIMED}, "absent, with the reason"
    (cell,) = [c for c in reports["bench"]["cells"] if c["title"] == headline_peers.SHOWN["bench"][0]]
    cell["refused"]["sdpa"] = "a reason"
    del cell["ratios"]["sdpa"]
    assert "| `sdpa` | refuses |" in headline_peers.peers(reports)
    cell["commit"] = None
    with pytest.raises(UsageError, match=r"'causal 4k \(float32\)' was not measured, or nobody knows"):
        headline_peers.peers(reports)


def forget_bench(reports: Reports) -> None:
    title = "BERT base batch 12-512, prepared (float32)"
    next(cell for cell in reports["bench"]["cells"] if cell["title"] == title)["commit"] = None


def forget_generation(reports: Reports) -> None:
    for speed in reports["real_models"][headline.H100]["speed"]:
        del speed["provenance"]["device"]


def forget_prompt(reports: Reports) -> None:
    reports["budget"]["speed"]["provenance"]["commit"] = None


@pytest.mark.parametrize("forget", [forget_bench, forget_generation, forget_prompt])
def test_a_figure_whose_commit_or_device_nobody_wrote_down_is_refused(
    forget: Callable[[Reports], None], reports: Reports
) -> None:
    forget(reports)
    for block in (headline.gains, headline.picture, headline.cases):
        with pytest.raises(UsageError, match="names no commit or device; measure it again"):
            block(reports)


def test_plans_whose_commit_nobody_wrote_down_are_refused(reports: Reports) -> None:
    reports["budget"]["seeds"][7]["provenance"]["commit"] = None
    with pytest.raises(UsageError, match="seed"):
        headline.kept(reports)


def another_ratio(reports: Reports) -> None:
    cells = {cell["title"]: cell for cell in reports["bench"]["cells"]}
    cells["BERT base batch 12-512, prepared (float32)"]["ratio_best"]["wall"]["median"] += 1


def another_time(reports: Reports) -> None:
    cells = {cell["title"]: cell for cell in reports["gpu"]["cells"]}
    cells[headline.OF_PACKED]["ratio_best"]["wall"]["median"] += 1


def another_prompt(reports: Reports) -> None:
    reports["budget"]["speed"]["model"]["8192"]["0.1 %"]["seconds"] /= 2


@pytest.mark.parametrize("change", [another_ratio, another_time, another_prompt])
def test_another_figure_would_show(change: Callable[[Reports], None], reports: Reports) -> None:
    blocks = (headline.gains, headline.picture, headline.cases)
    before = [block(reports) for block in blocks]
    change(reports)
    assert all(block(reports) != text for block, text in zip(blocks, before, strict=True))


def test_a_plan_that_fails_is_counted_where_it_fails(reports: Reports) -> None:
    seed = next(one for one in reports["budget"]["seeds"] if one["budget"] > 2e-3 and inside(one))
    assert headline.kept(reports).splitlines()[3] == "| SmolLM2-135M | 1 % | 20 of 20 | 19 of 20 | 12 of 20 |"
    checks = list(seed["check"].values())
    checks[0]["upper"] = 1.0
    assert headline.kept(reports).splitlines()[3] == "| SmolLM2-135M | 1 % | 20 of 20 | 19 of 20 | 11 of 20 |"
    checks[0]["delta_nll"] = 1.0
    assert headline.kept(reports).splitlines()[3] == "| SmolLM2-135M | 1 % | 20 of 20 | 18 of 20 | 11 of 20 |"
    seed["met"] = False
    assert headline.kept(reports).splitlines()[3] == "| SmolLM2-135M | 1 % | 19 of 20 | 18 of 20 | 11 of 20 |"


def test_what_is_beaten_is_not_bold(reports: Reports) -> None:
    stock = next(row for row in reports["budget"]["peers"]["rows"] if row["what"] == "stock sdpa")
    assert "**stock sdpa**" in frontier(reports)
    reports["budget"]["peers"]["rows"].append({**stock, "what": "a better one", "seconds": stock["seconds"] / 2})
    again = frontier(reports)
    assert "**a better one**" in again
    assert "**stock sdpa**" not in again


def test_times_of_plans_name_the_machine_of_each_and_leave_open_what_was_not_timed(reports: Reports) -> None:
    study = reports["budget_cuda"]
    timed = study["speed"]
    timed["renewed"]["attention, 8192"]["provenance"]["device"] = "another"
    rows = [row.split(" | ") for row in headline_tables.speed([study])[2:-1]]
    assert [row[2] for row in rows] == ["1", "1", "8", "8"]
    assert rows[0][1].startswith("NVIDIA H100, ")
    assert "and another, " in rows[0][1]
    del timed["model"]
    rows = [row.split(" | ") for row in headline_tables.speed([study])[2:-1]]
    assert rows[0][1].startswith("another, ")
    assert [row[3:5] for row in rows] == [["–", "–"]] * 4


def test_generation_is_told_by_its_own_section() -> None:
    """Of a report whose first section came from elsewhere, with the device of its own."""
    cell = {"sdpa": 9.0, "exact": 6.0, "plan 0.1 %": 4.5, "plan 1 %": 3.0, "sdpa, DynamicCache": 50.0}
    report = {
        "setting": {"device": "one", "commit": "a"},
        "settings": {"generation": {"device": "another", "commit": "b"}},
        "sections": {"generation": [{"cell": "8k tokens in a cache of 8k, ms a token", **cell}]},
    }
    head, _, row, _ = headline_tables.generation(report)
    assert "another, commit b" in head
    assert row == "| 8k tokens in a cache of 8k | 9.0 ms | 6.0 ms | 4.5 ms | 3.0 ms | 1.50 | 3.00 |"


def test_badges_say_what_pyproject_says() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    said = dict(headline.supported(text))
    assert said["Transformers"] == "5.17–5.24"
    other = text.replace('"transformers>=5.17,<5.25",', '"transformers>=5.18,<5.26",', 1)
    other = other.replace('"torch>=2.6",', '"torch>=2.7",', 1)
    assert dict(headline.supported(other)) == said | {"Transformers": "5.18–5.25", "PyTorch": "≥ 2.7"}
    written = headline.written(headline.kept_reports())
    for name, value in said.items():
        assert texts(written[headline.ASSETS / f"badge_{name.lower()}.svg"]) == [name, value]
        assert f"![{name} {value}](docs/assets/badge_{name.lower()}.svg)" in written[headline.README]


def test_what_is_missing_is_said(reports: Reports) -> None:
    with pytest.raises(UsageError, match="without"):
        headline.rewrite("no marks", {"gains": "table"})
    with pytest.raises(UsageError, match="packed 8 x 512"):
        headline.bench("packed 8 x 512 (float32)")({"bench": {"cells": [], "provenance": {}}})
