"""What a cache may store inside a loss budget: measured as decoding reads it, proved, kept with the plan and used."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import adaattn_hf
from adaattn_cli.pictures.headline import notes
from adaattn_cli.pictures.page import explorer
from adaattn_hf.attention.listeners import listening, tapping
from adaattn_hf.calibration.calibrate import choose_and_verify
from adaattn_hf.calibration.layers import Measurement
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.passes import stock_distance
from adaattn_hf.calibration.search import Candidate, ladder, roundings, solve, storages
from adaattn_hf.calibration.settings import Calibration
from adaattn_hf.eval.arms import FIRST, stored_tap
from adaattn_hf.eval.objectives import MaskedTokens
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.patches.plans.slots import layer_of
from adaattn_hf.plans.limits import Gates, unproven
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.policy.knapsack import SolverTable, of_cache
from adaattn_hf.policy.prices import PriceTable

from ..support.cached import ids
from ..support.calibration import calibrate, open_inputs, price_table, save_plan
from ..support.letters import SETTINGS, encode, letter_prices, lettered_llama
from ..support.recorder import Recorder
from .test_streaming_cache import LAYERS, llama

MEMORY = replace(SETTINGS, families=("window",), aim="memory", budget=6e-2)


@pytest.fixture(scope="module")
def measured(text: list[Path]) -> Measurement:
    return measure(open_inputs(lettered_llama(), encode, text, MEMORY), prices=letter_prices())


@pytest.mark.parametrize("stored", ["int8", "k8v4"])
def test_the_tap_answers_what_decoding_over_the_cache_answers(stored: str) -> None:
    """Behind the first piece, which the cache attends to before it is rounded."""
    model, tokens = llama(LAYERS[:1]), ids(2, 120)
    cache = AdaAttnCache(model, stored, streaming=True)
    with torch.no_grad():
        pieces = [(0, FIRST), (FIRST, 100), *((at, at + 1) for at in range(100, 120))]
        over_cache = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in pieces]
        bound_layers = {i: layer_of(m) for i, m in attention_modules(model, "llama")}
        with tapping(stored_tap(bound_layers, stored)):  # type: ignore[arg-type]
            tapped = model(tokens, use_cache=False).logits
        exact = model(tokens, use_cache=False).logits
    ours, theirs = tapped[:, FIRST:], torch.cat(over_cache, 1)[:, FIRST:]
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert float((ours - exact[:, FIRST:]).abs().max()) > 1e-3


def found(measured: Measurement, **changes: Any) -> Calibration:
    return choose_and_verify(measured, replace(MEMORY, **changes))


def test_the_smallest_cache_inside_the_budget_is_proved_stored_and_used(measured: Measurement, tmp_path: Path) -> None:
    result = found(measured)
    assert result.met, result.sentence
    words = result.plan.protocol["cache"]
    assert words["streaming"]
    assert words["stored"] == "k8v4"
    assert words["verified"]["passed"]
    assert words["verified"]["upper"] <= MEMORY.budget
    assert words["share"] == pytest.approx(told(result.plan, words["stored"]), rel=0.02)
    assert Plan.from_dict(result.plan.to_dict()).cache == ("k8v4", True)
    assert "cache: k8v4, heads with a window keep it alone" in notes(result.plan)
    with pytest.raises(PlanError, match=r"protocol\.cache is 'k8v4', expected a mapping"):
        _ = replace(result.plan, protocol={"cache": "k8v4"}).cache
    model = lettered_llama()
    model.save_pretrained(tmp_path)
    save_plan(model, result, tmp_path)
    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="adaattn")
    adaattn_hf.prepare(adaattn_hf.load_plan(loaded), unpad=False)
    seen = Recorder()
    with listening(seen):
        loaded.generate(ids(1, 90), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert {kind.stored for _, kind, _ in seen.calls} == {None, "k8v4"}
    adaattn_hf.prepare(loaded, unpad=False, cache="model", streaming=False)
    seen = Recorder()
    with listening(seen):
        loaded.generate(ids(1, 90), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert {kind.stored for _, kind, _ in seen.calls} == {None}


def told(plan: Plan, stored: str) -> float:
    model, length = lettered_llama(), MEMORY.lengths[0]
    ours = adaattn_hf.explain(model, cache=stored, streaming=True, plan=plan).cache
    plain = adaattn_hf.explain(model).cache
    assert ours is not None
    assert plain is not None
    return (ours.predict(1, length) - ours.per_sequence) / plain.predict(1, length)


def test_a_share_of_the_bytes_takes_the_most_precise_that_reaches_it(measured: Measurement) -> None:
    result = found(measured, kv_bytes=0.9)
    assert result.met
    cache = result.plan.protocol["cache"]
    assert cache["stored"] == "model"  # windows alone reach it, at no further loss
    assert cache["streaming"]
    assert cache["share"] <= 0.9


def test_what_no_format_reaches_and_what_the_budget_forbids_is_refused(measured: Measurement) -> None:
    result = found(measured, kv_bytes=0.01)
    assert not result.met
    assert "cache" not in result.plan.protocol
    assert "0.01x of the bytes is not reached by any format" in result.sentence
    tight = found(measured, budget=1e-6, kv_bytes=0.2)
    assert not tight.met
    assert "0.2x of the bytes is not reached" in tight.sentence


def test_without_the_question_nothing_is_said_of_a_cache(measured: Measurement, text: list[Path]) -> None:
    in_time = replace(MEMORY, aim="prompt")
    with pytest.raises(ValueError, match="measure again"):  # its candidates are others
        choose_and_verify(measured, in_time)
    result = choose_and_verify(measure(open_inputs(lettered_llama(), encode, text, in_time), prices=letter_prices()))
    assert "cache" not in result.plan.protocol
    assert "cache" not in result.report


def test_the_search_makes_tokens_few_by_windows_alone(text: list[Path]) -> None:
    """Families that save no memory are left out; a window may be wide where half a sequence would save no time."""
    settings = replace(MEMORY, families=SETTINGS.families, windows=(32, 96, 160))
    measurement = measure(open_inputs(lettered_llama(), encode, text, settings), prices=flat("w32+16", "w96+16"))
    choices = measurement.layers.candidates.choices
    assert [choice.label for choice in choices] == ["exact", "w32+16", "w96+16"]
    assert of_cache(measurement.kept_tokens).tolist() == [[192.0, 48.0, 112.0]] * 4
    own = replace(measurement.layers, windows={0: 100, 1: None})
    # such a layer keeps its own window, whatever a plan says
    sliding = of_cache(replace(measurement, layers=own).kept_tokens)
    assert sliding.tolist() == [[99.0, math.inf, math.inf]] * 2 + [[192.0, 48.0, 112.0]] * 2
    no_time = choose_and_verify(measurement)  # by the prices there is nothing to gain
    assert no_time.met
    assert no_time.plan.protocol["cache"]["streaming"]


def test_the_page_of_budgets_shows_what_a_search_for_a_small_cache_takes(text: list[Path]) -> None:
    """By prices nothing is gained, and the page would show exact attention beside the plan and nothing else."""
    settings = replace(MEMORY, windows=(32, 96))
    measurement = measure(open_inputs(lettered_llama(), encode, text, settings), prices=flat("w32+16", "w96+16"))
    result = choose_and_verify(measurement)
    alpha = np.array(result.report["alpha"])
    data = explorer(SolverTable.from_dict(result.report["table"]), result.plan)
    stops = [stop for stop in data["stops"] if "budget" in stop]
    assert len(stops) >= 3
    for stop in stops:
        assert stop["picks"] == solve(measurement, np.array([stop["budget"]]) / alpha).picks.tolist()
        assert stop["speed"] == 1.0
    assert data["stops"][-1]["memory"] == pytest.approx(48 / 192)


def flat(*labels: str) -> PriceTable:
    return price_table(MEMORY.lengths[0], dict.fromkeys(("exact", *labels), 1.0))


def steps(measured: Measurement, **changes: Any) -> tuple[list[Candidate], Gates, bool]:
    inputs = measured.inputs.with_settings(replace(MEMORY, **changes))
    rounding, flips = stock_distance(inputs)
    own = replace(measured, inputs=inputs, rounding=rounding)
    return ladder(own, roundings(own), Gates(inputs.settings.budget, rounding=rounding), flips, [])


def test_candidates_are_the_smallest_caches_within_their_share_whatever_their_format(measured: Measurement) -> None:
    length = MEMORY.lengths[0]
    costs = {stored: kl[length] for stored, kl in roundings(measured).items()}
    assert costs["k8v4"] > 1.5e-3 > costs["int8"] > 0
    tight, wide = steps(measured, budget=1.5e-3)[0], steps(measured)[0]
    assert {one.way.stored for one in tight} <= {"model", "int8"}
    assert wide[-1].way.stored == "k8v4"
    for many in (tight, wide):
        shares = [one.way.cost for one in many]
        assert shares == sorted(set(shares), reverse=True), "by bytes"
        for one in many:
            assert one.added(length) >= costs.get(one.way.stored, 0.0)
    (asked,) = steps(measured, kv_bytes=0.9)[0]
    assert asked.way.stored == "model", "numbers reach it, and no more is asked for"
    result = found(measured, budget=1.5e-3)
    assert result.plan.protocol["cache"]["stored"] == tight[-1].way.stored


def test_a_format_that_held_out_text_refuses_ends_the_sequence(
    measured: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is judged alone and over its cache, on the same text; where codes fail, the last that passed is kept."""

    def worse(bound_layers: Any, stored: str) -> Any:
        tap = stored_tap(bound_layers, stored)
        return tap if stored == "model" else lambda module, call: -3.0 * tap(module, call)

    monkeypatch.setattr("adaattn_hf.calibration.proof.stored_tap", worse)
    candidates = steps(measured)[0]
    first = next(at for at, one in enumerate(candidates) if one.way.stored != "model")
    result = found(measured)
    judged = [step for step in result.report["history"] if "verified" in step]
    assert [step["verified"]["passed"] for step in judged] == [True] * first + [False]
    assert "predictions differ too much" in judged[-1]["verified"]["sentence"]
    # its plan passed the test before that: it is proven without the format, and the best of all that are
    failed = storages(measured, candidates[first].way.allocation.picks)["model"]
    shares = [one.way.cost for one in candidates[:first]] + [failed.share] * failed.streaming
    cache = result.plan.protocol["cache"]
    assert (cache["stored"], cache["share"], cache["verified"]) == ("model", min(shares), None)
    assert unproven(result.plan) is None
    # the bytes that were asked for are a promise: what is proven and larger is not the answer
    assert not found(measured, kv_bytes=candidates[first].way.cost).met


def test_a_model_that_generates_nothing_is_refused(text: list[Path]) -> None:
    for settings in (MEMORY, replace(MEMORY, aim="step")):
        with pytest.raises(ValueError, match=f"aim is '{settings.aim}' for LlamaForCausalLM, which has no decode step"):
            calibrate(lettered_llama(), encode, text, settings, scoring=MaskedTokens(1))
    with pytest.raises(ValueError, match="aim is 'space'"):
        replace(MEMORY, aim="space")
    with pytest.raises(ValueError, match=r"kv_bytes is 1\.4"):
        replace(MEMORY, kv_bytes=1.4)
