"""The budget explorer: its plans are the solver's, its table is the calibration's, its page moves in a browser."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaattn_cli.pictures.page import explorer
from adaattn_hf.calibration.calibrate import choose_and_verify
from adaattn_hf.calibration.layers import Measurement, picks_of
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.search import solve, storages
from adaattn_hf.calibration.settings import Calibration
from adaattn_hf.policy.knapsack import SolverTable
from adaattn_hf.presets import load_preset

from ..support.browser import CONTRASTS, drawn, needs_browser
from ..support.calibration import open_inputs, save_plan
from ..support.command import adaattn
from ..support.letters import SETTINGS, encode, letter_prices, lettered_llama
from ..unit.test_plan_page import embedded


@pytest.fixture(scope="module")
def made(text: list[Path]) -> tuple[Measurement, Calibration]:
    measurement = measure(open_inputs(lettered_llama(), encode, text, SETTINGS), prices=letter_prices(int8=0.8))
    return measurement, choose_and_verify(measurement)


@pytest.fixture(scope="module")
def directory(made: tuple[Measurement, Calibration], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    save_plan(lettered_llama(), made[1], path)
    (path / "adaattn_report.json").write_text(json.dumps(made[1].report), encoding="utf-8")
    return path


def page(directory: Path) -> str:
    target = directory / "explore.html"
    adaattn("plan", "explore", directory, "--html", target, says="verified at most")
    return target.read_text(encoding="utf-8")


def test_every_plan_of_the_page_is_the_solvers(made: tuple[Measurement, Calibration], directory: Path) -> None:
    measurement, result = made
    data = embedded(page(directory))
    alpha = np.array(result.report["alpha"])
    exact, plan = result.report["price_exact_seconds"], result.report["price_plan_seconds"]
    budgets = [stop for stop in data["stops"] if "budget" in stop]
    assert len(budgets) >= 4
    for stop in budgets:
        found = solve(measurement, np.array([stop["budget"]]) / alpha)
        # of plans that take the same time any may be picked
        assert stop["speed"] == pytest.approx(exact / found.price, rel=1e-3)
        assert stop["loss"] == pytest.approx(sum(stop["risk"]), rel=1e-3, abs=1e-9)
        assert stop["loss"] <= stop["budget"]
    assert data["stops"][0]["picks"] == [0] * len(measurement.layers.units)
    (own,) = [stop for stop in data["stops"] if stop["proof"]]
    assert own["picks"] == picks_of(measurement, result.plan).tolist()
    assert own["proof"]["upper"] == result.plan.verified.upper  # type: ignore[union-attr]
    assert own["loss"] == pytest.approx(result.plan.predicted_loss, rel=1e-3)
    assert own["loss"] == pytest.approx(sum(own["risk"]), rel=1e-3)
    share = storages(measurement, np.array(own["picks"]))["model"].share
    assert own["memory"] == pytest.approx(share, rel=1e-3)
    assert data["stops"][0]["memory"] == 1.0 > data["stops"][-1]["memory"]
    losses = [stop["loss"] for stop in data["stops"]]
    assert losses == sorted(losses)
    assert own["speed"] == pytest.approx(exact / plan, rel=1e-3)


def test_the_heading_names_the_model(directory: Path) -> None:
    target = directory / "named.html"
    words = ["plan", "explore", str(directory), "--html", str(target), "--name", "Small <1>"]
    adaattn(*words)
    named, typed = embedded(target.read_text(encoding="utf-8")), embedded(page(directory))
    assert (named["title"], typed["title"]) == ("Small <1>", "LlamaForCausalLM")
    assert {**named, "title": ""} == {**typed, "title": ""}


def test_presets_that_may_spend_more_buy_more(made: tuple[Measurement, Calibration]) -> None:
    table = made[0].solver(np.ones(1))
    found = [table.solve(math.log1p(load_preset(name).budget or 0.0)) for name in ("exact", "balanced", "fast")]
    assert not found[0].picks.any()
    assert found[0].price > found[1].price > found[2].price


def test_a_table_survives_its_file_and_refuses_what_is_none(made: tuple[Measurement, Calibration]) -> None:
    table = made[0].solver(np.ones(1))
    table.prices[0, 1] = np.inf
    data = json.loads(json.dumps(table.to_dict()))
    again = SolverTable.from_dict(data)
    assert np.array_equal(again.prices, table.prices)
    assert np.array_equal(again.risks, table.risks)
    assert again.solve(1e-3).picks.tolist() == table.solve(1e-3).picks.tolist()
    for broken in ({}, {**data, "prices": [[1.0]]}, {**data, "units": 5}, {**data, "kept": 10**400}):
        with pytest.raises(ValueError, match="calibrate again"):
            SolverTable.from_dict(broken)
    broken_prices = {"constant": [[[-1.0] * len(data["choices"])]], "kind": [0] * len(data["units"])}
    with pytest.raises(ValueError, match="calibrate again"):
        SolverTable.from_dict({**data, **broken_prices})
    renamed = SolverTable.from_dict({**data, "choices": ["exact", *(f"x{c}" for c in data["choices"][1:])]})
    with pytest.raises(ValueError, match="its report does not hold"):
        explorer(renamed, made[1].plan)


@pytest.mark.parametrize(("report", "says"), [
    (None, "does not exist"), ("{}", "holds no table"), ("{", "adaattn_report.json"),
    ('{"table": {}}', "calibrate again"),
])  # fmt: skip
def test_a_plan_without_its_table_is_refused(directory: Path, tmp_path: Path, report: Any, says: str) -> None:
    plan = tmp_path / "adaattn_plan.json"
    plan.write_bytes((directory / "adaattn_plan.json").read_bytes())
    if report is not None:
        (tmp_path / "adaattn_report.json").write_text(report)
    adaattn("plan", "explore", plan, "--html", tmp_path / "x.html", code=2, says=says)
    assert not (tmp_path / "x.html").exists()


@needs_browser
def test_the_slider_moves_in_a_browser(directory: Path, tmp_path: Path) -> None:
    text = page(directory)
    data = embedded(text)
    move = "$('stop').value = %d; $('stop').dispatchEvent(new Event('input')); $('theme').click();"
    for at in (0, len(data["stops"]) - 1):
        found = drawn(text, move % at + CONTRASTS, tmp_path)
        stop = data["stops"][at]
        for name in {data["choices"][pick] for pick in stop["picks"]}:
            assert f"{name} × {sum(data['choices'][p] == name for p in stop['picks'])}<" in found
        assert f">{stop['name']}</output>" in found
        assert f"<td>{stop['speed']:.2f}</td>" in found
        assert "<polyline" in found
        assert ">verified</text>" in found
        assert ">predicted increase of the perplexity</text>" in found
        assert float(found.split('data-least="')[1].split('"')[0]) >= 4.5
