"""The figures of the README, its pictures and docs/figures.md are those of the kept results."""

from typing import Any
from xml.etree import ElementTree

import pytest

from adaattn_hf.errors import UsageError
from studies import headline, headline_tables
from studies.front.page import ROWS

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
    page = written[headline.README]
    assert page.count("²") > 1
    assert "² This model's shape with random weights." in page
    assert "| NVIDIA H200, bfloat16 |" in page, "rows say no dtype where all have the same"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_has_at_most_eight_bars_and_names_what_each_is_compared_with(reports: Reports) -> None:
    shown = texts(headline.picture(reports))
    rows = [row for place, rows in ROWS.items() for row in rows if row.bar]
    assert 4 <= len(rows) <= 8
    assert {row.bar for row in ROWS["gpu"] if row.bar} <= set(shown)
    assert sum(text.startswith("beside ") for text in shown) == sum(row.bar in shown for row in rows)


def test_searches_share_no_row_and_plans_without_a_commit_are_refused(reports: Reports) -> None:
    report = reports["real_models"]
    rows = headline_tables.kept(report).splitlines()[2:]
    found = [row.split(" | ")[2] for row in rows if "SmolLM2" in row]
    assert found == ["2 of 3", "8 of 10", "15 of 15", "3 of 3", "10 of 10", "15 of 15"], "failures count"
    assert len({row.rpartition(" | ")[2] for row in rows}) == 4
    assert "68 of 74 calibrations" in headline_tables.rates(report, headline.SEARCHES)
    own = [row for row in report["NVIDIA-H200"]["rows"] if row["met"] and row["budget"] == "1%"]
    own[0]["met"] = False
    own[2]["third"]["upper"] = 1.0
    assert "67 of 74 calibrations" in headline_tables.rates(report, headline.SEARCHES)
    assert "66 of 67, its 95 % upper bound for 59 of 67" in headline_tables.rates(report, headline.SEARCHES)
    own[0]["provenance"]["commit"] = None
    with pytest.raises(UsageError, match="has no commit"):
        headline_tables.kept(report)


def test_peers_are_timed_refuse_or_have_their_reason(reports: Reports) -> None:
    text = headline_tables.peers(reports)
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()[2:] if line.startswith("|")]
    rows = {way.strip("`"): figures for way, *figures in lines}
    assert set(rows) >= {"eager", "sdpa", "flex_attention"}
    assert all(float(figure) > 1 for figure in rows["sdpa"])
    assert rows["sdpa:flash"][-1] == "refuses"
    untimed = [name.strip(" `") for line in text.splitlines()[-8:] for name in line.rpartition(":")[2].split(",")]
    assert set(untimed) >= {"flash_attention_2", *headline_tables.UNTIMED}, "absent, with the reason"
    (cell,) = [c for c in reports["bench"]["cells"] if c["title"] == headline_tables.SHOWN["bench"][0]]
    cell["refused"]["sdpa"] = "a reason"
    del cell["ratios"]["sdpa"]
    assert "| `sdpa` | refuses |" in headline_tables.peers(reports)
    cell["commit"] = None
    with pytest.raises(UsageError, match=r"'causal 4k \(float32\)' was not measured, or nobody knows"):
        headline_tables.peers(reports)


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
        headline.rewrite("no marks", {"gpu": "table"})
