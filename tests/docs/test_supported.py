"""The page of supported models says what the survey of all families recorded, and nothing in it is raw."""

import json
from pathlib import Path
from typing import Any

import pytest

from ..conformance import survey
from ..support.models import main_output


def test_the_page_is_what_the_survey_recorded(checkout: Path) -> None:
    record = json.loads((checkout / "docs" / "results" / "supported.json").read_text(encoding="utf-8"))
    page = (checkout / "docs" / "supported.md").read_text(encoding="utf-8")
    assert survey.page(record) == page
    assert survey.raw(record["families"]) == []
    assert len(record["families"]) > 600
    assert page.count("\n| `") > 390
    served, refused = page.split("## Not supported")
    for name, part in {"llama": served, "modernbert": served, "deberta-v2": refused, "inkling2_text": refused}.items():
        assert f"\n| `{name}` |" in part
    assert "| `falcon` | looks its attention up in a table of its own: `KeyError: 'adaattn'` when it loads |" in refused


def failing(*args: Any) -> Any:
    return [][0]


def test_a_raw_error_and_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: Any, given: Any) -> Any:
        return main_output(model(**given)) + float(model.config._attn_implementation == "adaattn")

    assert survey.raw({"llama": survey.answers("llama")}) == []
    monkeypatch.setattr(survey, "explain", failing)
    monkeypatch.setattr(survey, "answer_of", wrong)
    explained, forward, prepared = sorted(survey.raw({"llama": survey.answers("llama")}))
    assert explained == "llama: explain: raw: IndexError: list index out of range"
    assert forward.startswith("llama: forward: raw: off by")
    assert prepared.startswith("llama: prepare: raw: off by")


def test_what_fails_with_stock_attention_is_not_ours() -> None:
    assert survey.tried(failing, failing) == "as stock: IndexError: list index out of range"
    assert survey.tried(failing) == "raw: IndexError: list index out of range"
