"""`config.adaattn["monitor"]`: a planned model watches itself, tightens, warns once, and changes nothing else."""

import copy
import logging
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import adaattn_hf
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.plans import monitor, sampled
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.choices import Choice
from adaattn_hf.plans.plan import EXACT, LayerPlan, UnitRecord
from adaattn_hf.plans.tensors import LayerTensors

from ..support.choices import make_choice
from ..support.letters import lettered_llama
from ..support.plans import give

LENGTH = 160
WINDOW = make_choice("window", 32, 4)


_model = partial(lettered_llama, layers=2, head_dim=16, initializer_range=0.2)


def _planned(p95: float, monitor: bool = True, choice: Choice = WINDOW) -> LlamaForCausalLM:
    model = _model()
    units = tuple(UnitRecord(i, h, 1e-4, 0.5, 1.0, p95 / 2, p95, p95**2) for i in (0, 1) for h in (0, 1))
    give(model, choice, lengths=(256,), units=units)
    model.config.adaattn |= {"monitor": monitor}
    return model


def _tokens(batch: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 128, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_quiet_plan_is_sampled_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    watched, alone = _planned(p95=0.9), _planned(p95=0.9, monitor=False)
    for _ in range(9):
        torch.testing.assert_close(watched(_tokens()).logits, alone(_tokens()).logits, rtol=0, atol=0)
    assert adaattn_hf.statistics(alone) == []
    first, second = adaattn_hf.statistics(watched)
    assert (first["layer"], first["calls"], first["rows"]) == (0, 9, 9)
    assert first["tightened"] == second["tightened"] == []
    assert all(0.0 < mass < 1.0 for mass in first["lost"])
    assert first["predicted_kl"] > 0.0
    assert not caplog.records


@torch.no_grad()
def test_a_plan_that_drops_more_than_calibrated_turns_exact_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = _planned(p95=1e-4)
    assert adaattn_hf.plan_of(model) is not None
    with caplog.at_level(logging.WARNING, logger="adaattn_hf"):
        for _ in range(monitor.LEAST_ROWS + 1):
            last = model(_tokens()).logits
    assert [entry["tightened"] for entry in adaattn_hf.statistics(model)] == [[0, 1], [0, 1]]
    assert len(caplog.records) == 1
    assert "Calibrate on text like this one" in caplog.text
    torch.testing.assert_close(last, _model()(_tokens()).logits)
    weights = model(_tokens(), output_attentions=True).attentions[0]
    assert float(weights[0, 0, -1, 4 : LENGTH - 32].abs().max()) > 0.0


@torch.no_grad()
def test_decode_is_sampled_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "STEP_SHARE", 4)
    model = _planned(p95=0.9)
    tokens = _tokens(length=48)
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=17, do_sample=False, pad_token_id=0)
    first = adaattn_hf.statistics(model)[0]
    assert (first["calls"], first["rows"]) == (17, 4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["batch", "padded left", "padded right", "packed", "padded decode"])
def test_runs_of_batches_are_sampled_in_turn_as_if_they_were_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured of each run is what is measured of its tokens alone; padding and neighbours are not in it."""
    monkeypatch.setattr(monitor, "STEP_SHARE", 1)
    tokens = _tokens(batch=2)
    runs = [tokens[:1], tokens[1:]]
    inputs: dict[str, Any] = dict(input_ids=tokens)
    if kind.startswith("padded"):
        mask = torch.ones_like(tokens)
        hidden = slice(None, 50) if kind != "padded right" else slice(-50, None)
        mask[1, hidden] = 0
        runs[1] = tokens[1:, 50:] if kind != "padded right" else tokens[1:, :-50]
        inputs |= dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    if kind == "packed":
        positions = torch.cat([torch.arange(LENGTH), torch.arange(LENGTH)])[None]
        inputs = dict(input_ids=tokens.reshape(1, -1), position_ids=positions, use_cache=False)
    watched, alone = _planned(p95=0.9), _planned(p95=0.9)
    for model, passes in ((watched, [inputs] * 2), (alone, [{"input_ids": run} for run in runs])):
        for given in passes:
            if kind == "padded decode":
                cache = model(**{k: v[:, :-1] for k, v in given.items()}).past_key_values
                last = {k: v if k == "attention_mask" else v[:, -1:] for k, v in given.items()}
                model(**last, past_key_values=cache)
            else:
                model(**given)
    found, wanted = adaattn_hf.statistics(watched)[0], adaattn_hf.statistics(alone)[0]
    assert found["rows"] == (4 if kind == "padded decode" else 2)
    if kind == "padded decode":  # each way of a pass meets one of the runs
        assert all(0.0 < mass < 1.0 for mass in found["lost"])
    else:
        torch.testing.assert_close(found["lost"], wanted["lost"], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_holes_in_padding_are_counted_and_not_sampled() -> None:
    model, mask = _planned(p95=1e-4), torch.ones(1, LENGTH, dtype=torch.long)
    mask[0, 40:120:3] = 0
    for _ in range(monitor.LEAST_ROWS + 1):
        model(_tokens(), attention_mask=mask)
    first = adaattn_hf.statistics(model)[0]
    assert (first["calls"], first["rows"], first["tightened"]) == (monitor.LEAST_ROWS + 1, 0, [])


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "repeated", "reentrant"])
def test_training_is_sampled_and_warned_of(checkpointing: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    loud, quiet = _planned(p95=1e-4).train(), _planned(p95=1e-4, monitor=False).train()
    if checkpointing is not None:
        for model in (loud, quiet):
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    steps = monitor.LEAST_ROWS + 1
    for _ in range(steps):
        for model in (loud, quiet):
            model.zero_grad()
            model(_tokens(), labels=_tokens(), use_cache=False).loss.backward()
    first = adaattn_hf.statistics(loud)[0]
    assert (first["calls"], first["rows"], first["loud"], first["tightened"]) == (steps, steps, [0, 1], [])
    said = [record.message for record in caplog.records if "trained under its plan" not in record.message]
    assert len(said) == 1
    assert "training goes on" in said[0]
    for mine, its in zip(loud.parameters(), quiet.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=0)
    with torch.no_grad():
        loud.eval()(_tokens())
    assert adaattn_hf.statistics(loud)[0]["tightened"] == [0, 1]


@torch.no_grad()
@pytest.mark.parametrize(("p95", "tightened"), [(0.5, []), (1e-4, [0, 1]), (0.0, [])])
def test_int8_is_watched_against_what_calibration_saw(p95: float, tightened: list[int]) -> None:
    """Of a plan whose calibration saw no rounding (0) nothing can be said."""
    model = _planned(p95=p95, choice=make_choice(precision="int8"))
    for _ in range(monitor.LEAST_ROWS + 1):
        last = model(_tokens()).logits
    first = adaattn_hf.statistics(model)[0]
    assert all(1e-4 < lost < 0.2 for lost in first["lost"])
    assert first["tightened"] == tightened
    assert torch.equal(last, _model()(_tokens()).logits) == bool(tightened)


def test_outliers_change_int8_more_and_few_rows_not_at_all() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 96, 8, generator=generator) for heads in (4, 2, 2))
    plan = LayerPlan(0, "", (make_choice(precision="int8"), EXACT))
    rows = torch.tensor([40, 63, 90])

    def changed(key: torch.Tensor, start: int = 0, limit: int = 64) -> torch.Tensor:
        bound_layer = BoundLayer(plan, LayerTensors(), limit)
        structure = MaskStructure(1, 96 - start, 96, causal=True, q_offset=start)
        call = AttentionCall(query[:, :, start:], key, value, structure, scaling=0.5)
        return sampled.losses(bound_layer, call, torch.tensor([0]) if start else rows)

    usual = changed(key)
    assert 1e-4 < float(usual[0, :2].min()) < float(usual[0, :2].max()) < 0.05
    assert float(usual[0, 2]) == 0.0  # beyond the plan's length
    assert not usual[1].any()  # nothing is lost
    outlier = key + torch.tensor([100.0, *[0.0] * 7])
    assert bool((changed(outlier)[0, :2] > 3 * usual[0, :2]).all())
    assert changed(outlier, start=80, limit=96)[0].all()
    assert not changed(outlier, start=81, limit=96).any()  # of few rows each is computed in the model's precision


@torch.no_grad()
def test_each_model_has_a_monitor_of_its_own() -> None:
    one = _planned(p95=0.9)
    two = copy.deepcopy(one)
    one(_tokens())
    assert adaattn_hf.statistics(two) == []
    two(_tokens())
    two(_tokens())
    assert [adaattn_hf.statistics(model)[0]["calls"] for model in (one, two)] == [1, 2]
    one.config.adaattn = {**one.config.adaattn, "monitor": True}  # set again: a new session
    one(_tokens())
    assert adaattn_hf.statistics(one)[0]["calls"] == 1


@torch.no_grad()
def test_a_plan_over_a_quantised_cache_runs_watched_as_it_runs_alone() -> None:
    model, found = _planned(p95=0.9, monitor=False, choice=make_choice("window", 32, 4, precision="int8")), []
    for watch in (nullcontext(), adaattn_hf.monitoring(model)):
        cache = adaattn_hf.AdaAttnCache(model, "int8")
        with watch:
            model(_tokens()[:, :-9], past_key_values=cache)
            found.append(model(_tokens()[:, -9:], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("extra", ["softcap", "sink_logits", "bias", "window"])
def test_dropped_mass_counts_what_the_call_counts(extra: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 96, 8, generator=generator) for heads in (4, 2, 2))
    extras: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 1.5}, "sink_logits": {"sink_logits": torch.randn(4, generator=generator)},
        "bias": {"bias": torch.randn(1, 4, 96, 96, generator=generator)}, "window": {},
    }  # fmt: skip
    structure = MaskStructure(1, 96, 96, causal=True, window=48 if extra == "window" else None)
    call = AttentionCall(query, key, value, structure, scaling=0.5, **extras[extra])
    bound_layer = adaattn_hf.plan_of(_planned(0.5)).layers[0]  # type: ignore[union-attr]
    rows = torch.tensor([3, 60, 95])
    found = sampled.losses(BoundLayer(bound_layer, LayerTensors(), 256), call, rows)
    weights = attention_weights(call)[0][:, rows]
    keys = torch.arange(96)
    far = (rows[:, None] - keys >= 32) & ((keys >= 4) | (extra == "window"))
    torch.testing.assert_close(found, (weights * far).sum(-1).view(2, 2, 3).amax(1), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_a_bias_for_all_queries_is_that_of_every_query() -> None:
    bias = torch.zeros(1, 1, 1, LENGTH)
    bias[..., :5] = torch.finfo(torch.float32).min
    found = []
    for given in (bias, bias.expand(1, 4, LENGTH, LENGTH)):
        watched = _planned(p95=0.9)
        watched(_tokens(), attention_mask=given)
        found.append([{**layer, "seconds": 0.0} for layer in adaattn_hf.statistics(watched)])
    assert found[0] == found[1]
    assert found[0][0]["rows"] == 1
