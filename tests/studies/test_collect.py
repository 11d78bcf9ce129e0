"""The kept reports: their page is what is generated from them, and the known figures are met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaattn_hf.eval import corpora, runner
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches import checkpoint
from studies import collect

from .conftest import PAGES

KEPT = Path("docs") / "results" / "quality"


def test_a_page_is_made_of_its_reports(llama: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load(llama, device="cpu")
    report = runner.evaluate(loaded, corpora.wikitext_corpus(PAGES, "own pages"), Settings(impl="eager"))
    runner.write_json(tmp_path / "own.json", report)
    known = [
        {"report": "own", "quantity": "tokens", "value": report["quality"]["arms"][0]["tokens"]},
        {"report": "absent", "quantity": "perplexity", "value": 1.5},
    ]
    runner.write_json(tmp_path / collect.KNOWN, known)
    collect.main([str(tmp_path)])
    text = (tmp_path / collect.PAGE).read_text(encoding="utf-8")
    assert f"| own | tokens | {known[0]['value']} | {known[0]['value']} | +0.0e+00 |" in text
    assert "| absent | perplexity | 1.5 | not measured | |" in text
    assert f"{report['quality']['arms'][1]['nll_per_token']:.8f}" in text


def test_a_finished_run_is_kept_by_its_name(tmp_path: Path) -> None:
    kept, run = tmp_path / "kept", tmp_path / "run"
    kept.mkdir()
    with pytest.raises(FileNotFoundError, match="no report in it; finish the run"):
        collect.main([str(kept), f"small={run}"])
    known = Path(__file__).resolve().parents[2] / KEPT / "stories15M-tinystories.json"
    for data in ("wikitext", "lambada"):
        (run / data).mkdir(parents=True)
        (run / data / "report.json").write_bytes(known.read_bytes())
    collect.main([str(kept), f"small={run}"])
    assert {path.name for path in kept.iterdir()} == {
        "small-wikitext.json",
        "small-lambada.json",
        collect.PAGE,
    }
    assert (kept / "small-lambada.json").read_bytes() == known.read_bytes()
    assert (kept / collect.PAGE).read_text(encoding="utf-8") == collect.page(kept)


def test_the_kept_page_is_the_one_that_its_reports_make(checkout: Path) -> None:
    directory = checkout / KEPT
    assert (directory / collect.PAGE).read_text(encoding="utf-8") == collect.page(directory)


def kept_known() -> list[dict[str, Any]]:
    """Known figures whose report is kept; the page says of the others that they were not measured."""
    directory = Path(__file__).resolve().parents[2] / KEPT
    known = json.loads((directory / collect.KNOWN).read_text(encoding="utf-8"))
    return [entry for entry in known if (directory / f"{entry['report']}.json").exists()]


def test_known_figures_are_repeated() -> None:
    assert len({entry["report"] for entry in kept_known()}) >= 3


@pytest.mark.parametrize("known", kept_known(), ids=lambda k: f"{k['report']} {k['quantity']}")
def test_stock_repeats_what_was_known(checkout: Path, known: dict[str, Any]) -> None:
    """To the digits that the known figures have (their float32 log-softmax costs up to 1e-5)."""
    report = json.loads((checkout / KEPT / f"{known['report']}.json").read_text(encoding="utf-8"))
    found = report["quality"]["arms"][0][known["quantity"]]
    value, digits = float(known["value"]), len(str(known["value"]).partition(".")[2])
    assert abs(found - value) <= (0.5 * 10**-digits + 2e-5 * value if digits else 0)
