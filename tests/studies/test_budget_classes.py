"""The comparison of one choice per head with one per head and class of lengths, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from adaattn_hf.calibration.inputs import open_inputs
from adaattn_hf.calibration.layers import observe_layers
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from studies.budget import study
from studies.budget.classes import FAMILIES, Problem, in_classes, markdown, risks_of_rows, saved, together

from ..support.source_tree import ROOT

PAGE = ROOT / "docs" / "results" / "length_classes.json"


def test_classes_pay_where_the_rows_differ() -> None:
    """Early rows must stay exact, late ones may be windowed: one choice for both saves nothing, one for each half."""
    prices = np.array([[1.0, 0.1]])
    early, late = (Problem(prices, np.array([[[0.0, risk]]])) for risk in (1e-2, 1e-6))
    one, split = (made([early, late]).solved(1e-3).price for made in (together, in_classes))
    assert one == pytest.approx(2.0)
    assert split == pytest.approx(1.1)
    assert saved(one, split) == pytest.approx(0.45)
    alike = [late, late]
    assert together(alike).solved(1e-3).price == pytest.approx(in_classes(alike).solved(1e-3).price)


def test_risks_of_classes_add_up_to_those_of_all_rows(tmp_path: Path) -> None:
    text = tmp_path / "pages.jsonl"
    text.write_text(
        "".join(json.dumps({"text": page}) + "\n" for page in calibration_pages()), encoding="utf-8"
    )
    model, encode = study.load(str(demo_model_path("llama")), "float32", "cpu", None, None)
    settings = CalibrationSettings(
        lengths=(128,), sequences=1, rows=16, labels=1, joint=1, held_out=2, most_held_out=2, tries=1, bolder=0,
        families=FAMILIES, windows=(32,),
    )  # fmt: skip
    inputs = open_inputs(model, encode, [text], settings)
    layers = observe_layers(inputs)
    whole = risks_of_rows(inputs, layers, 128, [0, 128])
    parts = risks_of_rows(inputs, layers, 128, [0, 32, 128])
    np.testing.assert_allclose(parts.sum(axis=0), whole[0], rtol=1e-12)
    window = [choice.label for choice in layers.candidates.choices].index("w32+16")
    assert (parts[0, :, window] == 0.0).all(), "rows shorter than the window lose nothing"
    assert (parts[1, :, window] > 0.0).all()


def test_the_page_is_that_of_the_kept_figures() -> None:
    text = markdown(json.loads(PAGE.read_text(encoding="utf-8")))
    assert text == PAGE.with_suffix(".md").read_text(encoding="utf-8")
