"""Pass two of calibration: what one choice of one unit costs, measured by forward passes of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from adaattn_hf.calibration import direct
from adaattn_hf.calibration.arms import ModelArms, compare, plan_tap, programs_of
from adaattn_hf.calibration.assemble import make_plan
from adaattn_hf.calibration.calibrate import CalibrationSettings, calibrate
from adaattn_hf.calibration.direct import STRETCHES, SingleChanges, mean_and_error
from adaattn_hf.calibration.inputs import open_inputs
from adaattn_hf.calibration.measure import Measurement, measure, measure_directly
from adaattn_hf.calibration.scoring import Reading
from adaattn_hf.calibration.search import JointPasses, refine, solve
from adaattn_hf.calibration.state import FILE
from adaattn_hf.plans.plan import EXACT, LayerPlan
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.tensors import LayerTensors
from adaattn_hf.policy.prices import Price, PriceTable

from ..support.choices import make_choice
from ..support.letters import encode, lettered_llama, random_letters

LENGTH = 128
LABELS = ("exact", "bf16", "w32+16", "w32+16 bf16")
SETTINGS = CalibrationSettings(
    budget=5e-3, lengths=(LENGTH,), sequences=2, rows=32, labels=2, held_out=4, tries=1, haystacks=0, windows=(32,),
    families=("window", "bf16"), joint=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return lettered_llama(layers=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [random_letters(tmp_path_factory.mktemp("text") / "book.txt")]


def prices() -> PriceTable:
    row = {label: Price(0.0, seconds) for label, seconds in zip(LABELS, (1.0, 0.6, 0.3, 0.2), strict=True)}
    return PriceTable("a table", {}, {"prefill": {LENGTH: row}, "decode": {LENGTH: row}})


@pytest.fixture
def measurement(model: LlamaForCausalLM, text: list[Path]) -> Measurement:
    return measure(open_inputs(model, encode, text, SETTINGS), prices=prices())


def test_one_change_costs_what_a_plan_of_that_change_costs(measurement: Measurement) -> None:
    """Against the whole model with a plan of one unit: early, middle and late layers, every choice."""
    pairs = [(unit, choice) for unit in range(len(measurement.layers.units)) for choice in (1, 2, 3)]
    found, error = measure_directly(measurement, pairs).direct_kl(LENGTH)
    costs = found > 0  # products in bf16 cost nothing where the processor computes them in float32
    assert costs[[choice == LABELS.index("w32+16") for _, choice in pairs]].all()
    assert ((error > 0) == costs).all()
    for (unit, choice), kl in zip(pairs, found, strict=True):
        picks = np.zeros(len(measurement.layers.units), dtype=np.int64)
        picks[unit] = choice
        tap = plan_tap(programs_of(make_plan(measurement, picks), measurement.layers.tensors))
        inputs = measurement.inputs
        scores = [
            compare(inputs.arms, torch.tensor([one.tokens]), tap).kl[0] for one in inputs.samples[LENGTH].risk
        ]
        # stretches of 16 tokens but for the last, which predicts nothing after itself
        wanted = np.mean([float(part.mean()) for one in scores for part in np.array_split(one, STRETCHES)])
        assert kl == pytest.approx(wanted, rel=1e-3, abs=1e-12)
    assert found.max() > (100 if costs.all() else 2) * found[costs].min()


def test_a_planted_wrong_estimate_is_corrected_and_leaves_the_plan(measurement: Measurement) -> None:
    """An estimate that is a thousandth of the truth is what a knapsack falls for: the second solve does not."""
    limit = np.array([SETTINGS.budget])
    window = [choice.label for choice in measurement.layers.candidates.choices].index("w32+16 bf16")
    true = measurement.risks()[0, :, window]
    victim = int(true.argmax())
    limit[0] = 0.5 * true[victim]
    table = measurement.state.risks[LENGTH]
    table.total[victim, window] /= 1000
    table.means[victim, window] /= 1000
    table.squares[victim, window] /= 1000**2
    fooled = solve(measurement, limit)
    assert fooled.picks[victim] == window
    refined = refine(measurement, fooled, limit, 2 * len(measurement.layers.units))
    assert measurement.decided == ()
    assert (victim, window) in refined.decided
    found = refined.risks()[0, victim, window]
    measured = refined.direct_kl(LENGTH)[0][refined.decided.index((victim, window))]
    assert 0.3 < found / measured < 1.5
    again = solve(refined, limit)
    assert again.picks[victim] != window
    passes = JointPasses(measurement)
    kl = [passes.joint(one.picks, LENGTH).kl for one in (fooled, again)]
    assert kl[0] > 2 * limit[0] > kl[1]


def test_few_pairs_leave_other_risks_in_their_order(measurement: Measurement) -> None:
    before = measurement.risks()
    after = measure_directly(measurement, [(0, 2), (1, 2)]).risks()
    rest = [unit for unit in range(len(measurement.layers.units)) if unit > 1]
    ratio = after[0, rest, 1:] / before[0, rest, 1:]
    assert ratio == pytest.approx(ratio.flat[0])
    assert (after[0, :, 0] == 0).all()


def test_a_reading_of_few_predictions_has_as_many_stretches(model: LlamaForCausalLM) -> None:
    """A masked model's reading of a short text: the mean of no prediction was no number."""
    tokens = torch.arange(LENGTH)[None] % 128
    few = SingleChanges(ModelArms(model), Reading(tokens, tokens[0, :3], torch.tensor([50, 80, 90])))
    choices = (make_choice("window", 16, 8), EXACT)
    found = few.kl(Program(LayerPlan(0, "", choices), LayerTensors(), LENGTH))
    assert found.shape == (3,)
    assert (found > 0).all()


def test_the_error_is_that_of_the_mean_over_stretches() -> None:
    stretches = [np.array([1.0, 3.0]), np.array([2.0, 6.0])]
    mean, error = mean_and_error(stretches)
    assert mean == 3.0
    assert error == pytest.approx(np.std([1, 3, 2, 6], ddof=1) / 2)


def test_pairs_are_recorded_and_an_interrupted_pass_goes_on(
    model: LlamaForCausalLM, text: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, direct=4)
    whole = calibrate(model, encode, text, settings, prices=prices())
    assert whole.plan.protocol["measured_directly"] == 4
    rows = whole.report["direct"]
    assert len(rows) == 4
    assert all(row["measured"] > 0 and row["error"] > 0 and row["risk"] > 0 for row in rows)
    real, calls = direct.measured_pairs, 0

    def stops(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(direct, "measured_pairs", stops)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, encode, text, settings, prices=prices(), directory=tmp_path)
    assert (tmp_path / FILE).is_file()
    resumed = calibrate(model, encode, text, settings, prices=prices(), directory=tmp_path, resume=True)
    assert calls == 3, "the first sequence was measured twice"
    assert resumed.plan.to_json() == whole.plan.to_json()
    none = calibrate(model, encode, text, SETTINGS, prices=prices())
    assert none.plan.protocol["measured_directly"] == 0
    assert none.report["direct"] == []


def test_a_negative_number_of_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="direct is -1, expected a number of pairs"):
        replace(SETTINGS, direct=-1)
