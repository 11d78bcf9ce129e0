"""The page of a budget study: what is counted, what text of another kind says, what is kept of an earlier study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaattn_hf.policy.prices import Price, PriceTable
from studies.budget import texts
from studies.budget.pairs import fewer_pairs, lines_of
from studies.budget.report import _gaps, inside, main, times_exact, write_page

TABLE = PriceTable(
    "a machine", {"exact": "one", "bf16": "one"},
    {"prefill": {64: {"exact": Price(1.0, 4.0), "bf16": Price(1.0, 1.0), "w16": Price(0.5, 0.5)}}},
)  # fmt: skip


def record(budget: float, seed: int, upper: float, elsewhere: float | None, picks: list[str]) -> dict[str, Any]:
    verdict = {
        "upper": upper, "delta_nll": upper / 2, "kl": 1e-4, "predicted_kl": 1.2e-4, "top1": 0.99, "passed": True,
        "retrieval_stock": None, "sentence": "passed",
    }  # fmt: skip
    settings = {
        "model": "m", "dtype": "float32", "lengths": [64], "data": ["a.txt"], "verify_data": ["b.txt"], "sequences": 1,
        "rows": 8, "labels": 1, "joint": 1, "held_out": 2, "most_held_out": 4, "check_data": ["c.txt"], "check": 2,
    }  # fmt: skip
    found = {
        "settings": settings, "budget": budget, "seed": seed, "met": True, "sentence": "passed", "kv_heads": 2,
        "picks": picks, "report": {"verdicts": [verdict], "history": [{"verified": verdict}], "table": {"large": 1}},
        "ratio": {"64": 2.0}, "prices": TABLE.digest,
        "provenance": {"device": "cpu", "versions": {"torch": "2", "transformers": "5"}},
    }  # fmt: skip
    if elsewhere is not None:
        found["check"] = {"64": {"upper": elsewhere, "delta_nll": elsewhere / 2}}
    return found


def test_speed_of_a_plan_by_a_price_table() -> None:
    """A launch is paid for once a layer: exact and bf16 heads share one, a window has its own."""
    exact, mixed, windows = 1.0 + 8.0, 1.0 + 4.0 + 1.0, 0.5 + 1.0
    found = times_exact(["exact", "bf16", "w16", "w16"], 2, TABLE, 64)
    assert found == pytest.approx(2 * exact / (mixed + windows))


def test_a_page_counts_both_texts_and_sets_earlier_plans_beside_them(tmp_path: Path) -> None:
    seeds = tmp_path / "study" / "seeds"
    seeds.mkdir(parents=True)
    records = [record(1e-3, 0, 8e-4, 9e-4, ["w16"] * 4), record(1e-3, 1, 6e-4, 1.1e-3, ["w16"] * 4)]
    assert [inside(one) for one in records] == [True, False]
    for one in records:
        (seeds / f"seed-{one['seed']:03d}-0.001000.json").write_text(json.dumps(one))
    (tmp_path / "study" / "prices.json").write_text(TABLE.to_json())
    old = tmp_path / "old.json"
    peers = {"words": ["peers"], "rows": [{"what": "a peer", "KL": 1.0}]}
    old.write_text(json.dumps({"seeds": [record(1e-3, 0, 3e-4, None, ["bf16"] * 4)], "peers": peers}))
    main(tmp_path / "study", tmp_path / "page.json", old)
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| 0.1 % | 2 of 2 | 2, 1 of 2 | 70% (60% to 80%) | 100% (90% to 110%) | 2.00 (2.00 to 2.00) |" in page
    speed = times_exact(["bf16"] * 4, 2, TABLE, 64)
    earlier = f"| 0.1 %, earlier search | 1 of 1 | – | 30% (30% to 30%) | – | {speed:.2f} ("
    assert earlier in page
    assert (
        "seed 1: inside on every held-out text; on the text of another kind it loses 5.50e-04, at most 1.10e-03" in page
    )
    assert "| a peer | 1 |" in page
    assert "Of an earlier study" in page
    assert "large" not in (tmp_path / "page.json").read_text(encoding="utf-8")


def test_seeds_without_a_plan_are_counted_by_their_reason(tmp_path: Path) -> None:
    for seed in (0, 1):
        none = record(1e-3, seed, 0.0, 0.0, ["exact"] * 4) | {
            "met": False,
            "sentence": "no choice saves time",
        }
        none["report"] = {"verdicts": [], "history": []}
        path = tmp_path / "study" / "seeds" / f"seed-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(none))
    main(tmp_path / "study", tmp_path / "page.json")
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "* 0.1 %: 2 of 2 seeds: no choice saves time" in page
    assert "| 0.1 % | 0 of 2 |" in page


def test_modules_of_a_library_are_documents(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "test/c.py", "short.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * (1 if name == "short.py" else texts.SHORTEST), encoding="utf-8")
    assert [one["name"] for one in texts.documents(tmp_path)] == ["a.py", "b.py"]
    assert [one["name"] for one in texts.documents(tmp_path, enough=1)] == ["a.py"]
    texts.main([str(tmp_path / "texts.jsonl"), str(tmp_path), "a*"])
    lines = (tmp_path / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a.py"]


def test_help_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        texts.main(["--help"])
    assert left.value.code == 0
    assert "python -m studies.budget.texts" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_committed_report_is_the_one_of_its_json(tmp_path: Path, checkout: Path) -> None:
    source = checkout / "docs" / "results" / "budget.json"
    write_page(source, tmp_path / "budget.md")
    text = (tmp_path / "budget.md").read_text(encoding="utf-8")
    assert text == (checkout / "docs" / "results" / "budget.md").read_text(encoding="utf-8")
    study = json.loads(source.read_text(encoding="utf-8"))
    strict = [seed for seed in study["seeds"] if seed["budget"] < 2e-3]
    assert len({seed["seed"] for seed in strict}) == len(strict) >= 20
    assert sum(seed["met"] for seed in strict) >= 19


def test_what_rounding_adds_is_not_held_against_a_prediction() -> None:
    """Records that do not say how much it is keep what was measured, and the page says so."""
    verdict = {"predicted_kl": 2e-4, "kl": 1.9e-3}
    assert _gaps({"report": {"verdicts": [verdict]}}) == pytest.approx([2e-4 / 1.9e-3])
    assert _gaps({"report": {"verdicts": [verdict], "rounding": 1.5e-3}}) == pytest.approx([0.5])
    assert _gaps({"report": {"verdicts": [verdict], "rounding": 2e-3}}) == []


@pytest.mark.parametrize("length", [5, 64])
def test_fewer_pairs_are_those_that_rows_see(length: int) -> None:
    """Counted row by row; kept blocks depend on the data, and sinks may be more than what a window hides."""
    rules = {
        "w2+1": (2, 1),
        "w16+4": (16, 4),
        "w3+60 int8": (3, 60),
        "exact": (length, 0),
        "int8": (length, 0),
    }
    for picks in ([*rules], ["exact"], ["w2+1", "w2+1", "w3+60 int8"]):
        read = sum(
            min(i + 1, window) + min(sinks, max(i + 1 - window, 0))
            for window, sinks in map(rules.__getitem__, picks)
            for i in range(length)
        )
        expected = len(picks) * length * (length + 1) / 2 / read
        assert fewer_pairs(picks, length) == pytest.approx(expected)
    assert fewer_pairs(["exact", "p0.9"], length) is None
    assert lines_of([{"picks": ["p0.9"], "ratio": {str(length): 1.0}}], "1 %") == []
