"""Decode steps stay exact where no choice is faster there, and prices are those of as many sequences as asked for."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from adaattn_cli.pictures.headline import notes
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.capability import cpu_name
from adaattn_hf.backends.native.library import level_here
from adaattn_hf.calibration import pricing
from adaattn_hf.calibration.calibrate import choose_and_verify
from adaattn_hf.calibration.layers import steps_stay_exact
from adaattn_hf.calibration.measure import measure
from adaattn_hf.patches.observe.explain import explain
from adaattn_hf.patches.plans import attach
from adaattn_hf.plans import execute
from adaattn_hf.plans.plan import EXACT, Plan, PlanError
from adaattn_hf.plans.tensors import LayerTensors
from adaattn_hf.policy.prices import Price, PriceTable

from ..support.calibration import calibrate, open_inputs
from ..support.choices import make_choice
from ..support.letters import CHOICES, LENGTH, SETTINGS, encode, letter_prices, lettered_llama


def _dear_steps(**cheaper: float) -> PriceTable:
    """Prices of windows that save nine tenths of a prefill, and cost twice as much as exact attention in decode."""
    cheap = letter_prices()
    steps = {
        label: Price(0.0, 1.0 if label == "exact" else cheaper.get(label, 2.0))
        for label in cheap.prices["decode"][LENGTH]
    }
    return PriceTable("a table", {}, {"prefill": cheap.prices["prefill"], "decode": {LENGTH: steps}})


def test_a_plan_that_pays_in_prefill_alone_leaves_decode_steps_exact(text: list[Path]) -> None:
    model = lettered_llama()
    found = calibrate(model, encode, text, SETTINGS, prices=_dear_steps())
    assert found.met, found.sentence
    assert found.plan.exact_steps
    assert Plan.from_json(found.plan.to_json()).exact_steps
    assert any("decode steps stay exact" in line for line in notes(found.plan))
    tokens = torch.randint(0, 128, (1, LENGTH - 1), generator=torch.Generator().manual_seed(0))

    def run(plan: Plan | None) -> tuple[torch.Tensor, torch.Tensor]:
        attach.remove_plan(model)
        with torch.no_grad():
            cache = model(tokens[:, :-1], use_cache=True).past_key_values
            if plan is not None:
                attach.load_plan(model, plan)
            return model(tokens).logits, model(tokens[:, -1:], past_key_values=cache).logits

    (exact, exact_step), (planned, planned_step) = run(None), run(found.plan)
    assert not torch.allclose(planned, exact, atol=1e-4)
    torch.testing.assert_close(planned_step, exact_step, atol=1e-5, rtol=1e-5)
    everywhere = replace(found.plan, protocol={name: found.plan.protocol[name] for name in ("settings",)})
    assert not torch.allclose(run(everywhere)[1], exact_step, atol=1e-4)
    words = {choice.phase: choice.plan for choice in explain(model, plan=found.plan).layers if choice.plan}
    assert "prefill" in words
    assert "decode" not in words
    with pytest.raises(PlanError, match=r"protocol\.decode is 'fast'"):
        _ = replace(found.plan, protocol={"decode": "fast"}).exact_steps


@pytest.fixture
def call() -> AttentionCall:
    query, key = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16)
    return AttentionCall(query, key, key, MaskStructure(1, 64, 64, causal=True), 0.25)


def test_a_plan_whose_steps_are_faster_runs_in_them_too(text: list[Path]) -> None:
    cheap = {label: 0.1 for label in CHOICES if label.startswith("w")}
    found = calibrate(lettered_llama(), encode, text, SETTINGS, prices=_dear_steps(**cheap))
    assert found.met
    assert not found.plan.exact_steps

    choices = SimpleNamespace(choices=[EXACT, make_choice("window", 32, 16)])
    layers: Any = SimpleNamespace(candidates=choices, windows={0: None}, kinds={0: None}, units=[(0, 0), (0, 1)])
    tables = _dear_steps(), _dear_steps(**{"w32+16": 0.8}), _dear_steps(**{"w32+16": 0.92})
    stay = [steps_stay_exact(table, layers, [LENGTH], np.array([0, 1])) for table in tables]
    assert stay == [True, False, True], "the last is noise: half of the heads, so 4 % of the whole"


def test_a_plan_for_steps_is_priced_by_them_alone(text: list[Path]) -> None:
    """Windows that save nothing of a prompt and much of a step, and the other way round; precision saves none."""
    row = dict.fromkeys(CHOICES, 1.0) | {"w32+16": 0.1, "w96+16": 0.4, "w64+16": 0.2}
    table = PriceTable("a table", {}, {"decode": {LENGTH: {label: Price(0.0, cost) for label, cost in row.items()}}})
    step = replace(SETTINGS, aim="step")
    measurement = measure(open_inputs(lettered_llama(), encode, text, step), prices=table)
    assert [choice.label for choice in measurement.layers.candidates.choices] == ["exact", "w32+16", "w64+16"]
    assert measurement.prices.tolist() == [[1.0, 0.1, 0.2]] * 4
    found = choose_and_verify(measurement)
    assert found.met, found.sentence
    assert not found.plan.exact_steps
    assert found.report["price_exact_seconds"] > found.report["price_plan_seconds"]
    with pytest.raises(ValueError, match="expected those that the measurement was made with"):
        choose_and_verify(measurement, SETTINGS)
    with pytest.raises(ValueError, match="the table has no prefill price"):
        measure(open_inputs(lettered_llama(), encode, text, SETTINGS), prices=table)
    none = choose_and_verify(replace(measurement, prices=np.ones_like(measurement.prices)))
    assert (none.met, none.plan.is_exact) == (False, True)
    assert "the budget saves time in a step of one row on this machine; longer --lengths" in none.sentence
    assert "more rows (--batch-size, now 1)" in none.sentence


def test_prices_are_of_the_batch_asked_for(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Mock(side_effect=execute.attend)
    monkeypatch.setattr(execute, "attend", watched)
    choices = [EXACT, make_choice("window", 32, 4)]
    options = {"phases": pricing.PHASES, "batch": 3}
    table = pricing.measure_prices({None: {64: call}}, choices, LayerTensors(), **options)
    assert table.machine.startswith(f"{cpu_name()} ({level_here()}), ")
    seen = [each.args[1] for each in watched.call_args_list]
    assert {(one.structure.batch, *one.query.shape[:3:2]) for one in seen} == {(3, 3, 64), (3, 3, 1)}
    assert pricing.repeated(call, 1) is call, "no copy, whose layout would be another"
    assert set(table.prices["decode"][64]) == {"exact", "w32+4"}
    with pytest.raises(ValueError, match="batch is 0, expected at least 1"):
        replace(SETTINGS, batch=0)


@pytest.mark.parametrize("captured", [False, True])
def test_steps_that_are_captured_cost_nothing_of_the_host(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value={})
    monkeypatch.setattr(pricing, "on_device", asked)
    for phase in pricing.PHASES:
        pricing._timed({}, phase, True, captured)
    assert [each.kwargs["host"] for each in asked.call_args_list] == [False, not captured]


def test_exact_attention_is_priced_as_layers_call_it(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backend's fast call; what no fast call serves goes the way of plans."""
    watched = Mock(side_effect=execute.attend)
    monkeypatch.setattr(execute, "attend", watched)

    def planned() -> set[str]:
        layers = [each.args[0].plan for each in watched.call_args_list]
        return {"+".join(choice.label for choice in layer.choices) for layer in layers}

    options = {"phases": pricing.PHASES}
    pricing.measure_prices({None: {64: call}}, [EXACT, make_choice("window", 32, 4)], LayerTensors(), **options)
    assert planned() == {"w32+4", "w32+4+w32+4"}
    sinks = replace(call, sink_logits=torch.zeros(4))
    pricing.measure_prices({None: {64: sinks}}, [EXACT], LayerTensors(), **options)
    assert "exact+exact" in planned()


def test_heads_cost_nothing_where_more_of_them_take_no_longer() -> None:
    """A step that takes as long as its launch: three heads and one differ by noise, charged once for every token."""
    one, three, longer = (79e-6, 80e-6, 83e-6), (81e-6, 82e-6, 84e-6), (90e-6, 92e-6, 94e-6)
    for heads, spreads, expected in (
        ([1, 3], [one, three], (81e-6, 0.0)),
        ([1, 3], [one, longer], (74e-6, 6e-6)),
        ([1, 3], [one, (300e-6,) * 3], (0.0, 98e-6)),
        ([2], [longer], (0.0, 46e-6)),
    ):
        line = pricing.line_through(heads, spreads)
        assert (line.constant, line.slope) == pytest.approx(expected)


def test_heads_of_a_launch_that_fills_a_device_cost_their_share_of_it() -> None:
    """There a launch of several kinds of heads takes the mean of the launches of each kind alone."""
    spread = {"exact": (161e-6, 292e-6), "w1024+16": (65e-6, 120e-6)}
    spreads = {label: [(time, time, time) for time in times] for label, times in spread.items()}
    told = pricing.prices_of([3, 6], spreads, "exact", True)
    assert told == {"exact": Price(0.0, 161e-6 / 3), "w1024+16": Price(0.0, 65e-6 / 3)}
    waiting = {"exact": [(161e-6,) * 3, (200e-6,) * 3], "w1024+16": [(65e-6,) * 3, (66e-6,) * 3]}
    for on_cuda, given in ((True, waiting), (False, spreads)):
        lines = pricing.prices_of([3, 6], given, "exact", on_cuda)
        assert lines == {label: pricing.line_through([3, 6], own) for label, own in given.items()}


def test_a_device_is_timed_with_all_heads_and_twice_as_many(call: AttentionCall) -> None:
    for on_cuda, batch, expected in (
        (False, 1, {1: (1, 1), 2: (1, 2)}),
        (False, 3, {1: (3, 1), 2: (3, 2)}),
        (True, 1, {2: (1, 2), 4: (2, 2)}),
        (True, 3, {2: (3, 2), 4: (6, 2)}),
    ):
        parts = pricing.by_heads(call, batch, on_cuda)
        assert {heads: tuple(part.key.shape[:2]) for heads, part in parts.items()} == expected
        assert all(part.structure.batch == part.key.shape[0] for part in parts.values())
