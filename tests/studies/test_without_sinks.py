"""What windows cost without the first keys: nothing where they are wide, and a page of what was measured."""

import json

import pytest
import torch

from studies import without_sinks

from ..support.models import fresh_pair, tokens
from ..support.source_tree import ROOT


def test_a_window_that_holds_every_key_costs_nothing_and_a_narrow_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = fresh_pair("llama").ours, tokens()
    wide = without_sinks.measure(model, ids)
    assert [*wide] == ["0", "1", "4", "16"]
    assert all(rises == pytest.approx([0.0] * len(ids), abs=1e-6) for rises in wide.values())
    monkeypatch.setattr(without_sinks, "WINDOW", 1)
    narrow = without_sinks.measure(model, ids)
    assert abs(narrow["0"][0]) > 1e-4
    assert narrow["0"] != narrow["4"]


def test_the_kept_page_is_of_the_kept_figures() -> None:
    place = ROOT / "docs" / "results"
    data = json.loads((place / "without_sinks.json").read_text("utf-8"))
    assert without_sinks.page(data) == (place / "without_sinks.md").read_text("utf-8")
    assert torch.tensor(data["rise"]["0"]).mean() > 10 * torch.tensor(data["rise"]["16"]).mean()
