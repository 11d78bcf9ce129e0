"""Calibration end to end on a tiny model: decide, prove, store, reload, refuse."""

import copy
import errno
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from adaattn_cli.job import read_budget
from adaattn_hf.attention.listeners import tapping
from adaattn_hf.calibration import fisher, search
from adaattn_hf.calibration import measure as measuring
from adaattn_hf.calibration import proof as verify
from adaattn_hf.calibration.calibrate import choose_and_verify, proven_candidates
from adaattn_hf.calibration.inputs import Inputs
from adaattn_hf.calibration.layers import Measurement, observe_layers
from adaattn_hf.calibration.measure import forecast, measure, memory_words
from adaattn_hf.calibration.search import Joint
from adaattn_hf.calibration.settings import Calibration, CalibrationSettings
from adaattn_hf.calibration.state import FILE, RISKS_FILE, CalibrationState
from adaattn_hf.eval.arms import ModelArms, compare, exact_tap
from adaattn_hf.eval.needles import build, most, retrieved
from adaattn_hf.eval.windows import TokenSequence, TokenWindow, draw, next_token
from adaattn_hf.patches.plans import attach
from adaattn_hf.plans import store
from adaattn_hf.plans.limits import Gates
from adaattn_hf.plans.plan import EXACT, Plan, PlanError
from adaattn_hf.plans.sampled import row_outputs
from adaattn_hf.plans.tensors import LayerTensors
from adaattn_hf.stats.paired import Ratio, TokenScores
from adaattn_hf.stats.profile import stratified_rows
from studies.ablation import KEPT, row_of
from studies.budget import ratio

from ..support.calibration import calibrate, open_inputs, save_plan
from ..support.choices import make_choice
from ..support.letters import CHOICES, LENGTH, SETTINGS, encode, letter_prices, lettered_llama


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return lettered_llama()


@pytest.fixture(scope="module")
def measurement(model: LlamaForCausalLM, text: list[Path]) -> Measurement:
    return measure(open_inputs(model, encode, text, SETTINGS), prices=letter_prices())


@pytest.fixture(scope="module")
def result(measurement: Measurement) -> Calibration:
    return choose_and_verify(measurement)


def test_a_plan_passes_inside_the_budget(result: Calibration) -> None:
    assert result.met, result.sentence
    verified = result.plan.verified
    assert verified is not None
    assert verified.passed
    assert verified.upper <= SETTINGS.budget
    assert verified.kl <= SETTINGS.budget
    assert not result.plan.is_exact
    assert verified.activation > 0
    assert sum(unit.price for unit in result.plan.units) < sum(unit.exact_price for unit in result.plan.units)
    assert verified.confidence == 0.95
    measured = [max(step["measured"]) for step in result.report["history"] if "measured" in step]
    judged = [step["verified"] for step in result.report["history"] if "verified" in step]
    assert len(measured) >= len(judged) >= 2, "candidates are fixed before the first is judged"
    assert {(one["confidence"], one["tokens"]) for one in judged} == {(0.95, 8 * (LENGTH - 1))}, "all by the same text"
    assert [one["passed"] for one in judged[:-1]] == [True] * (len(judged) - 1)
    assert verified.tries == sum(one["passed"] for one in judged)


def test_the_ablation_reads_a_report_as_calibrations_write_it(result: Calibration) -> None:
    measured = [step for step in result.report["history"] if "measured" in step]
    assert 0 < len(measured) < len(result.report["history"])
    report = {name: result.report[name] for name in KEPT}
    _, _, _, over, candidates = row_of(
        "all", {"verified": result.plan.verified and vars(result.plan.verified), **report}
    )
    assert float(over) == pytest.approx(measured[0]["measured"][0] / measured[0]["predicted"][0], abs=0.005)
    assert candidates == str(len(measured))


def test_predicted_risk_orders_and_sizes_the_measured_kl(model: LlamaForCausalLM, text: list[Path]) -> None:
    """Untrained heads err in step over rows, which the diagonal form leaves out: the size holds to a small factor."""
    settings = replace(SETTINGS, sequences=4, rows=LENGTH, labels=4, held_out=6)
    measurement = measure(open_inputs(model, encode, text, settings), prices=letter_prices())
    risks = measurement.risks()[-1].sum(axis=0)
    labels = [choice.label for choice in measurement.layers.candidates.choices]
    places = [labels.index(label) for label in ("w64+16", "w32+16", "r16")]
    everywhere = [np.full(len(measurement.layers.units), place) for place in places]
    predicted = [float(risks[place]) for place in places]
    measured = [search.joint(measurement, picks, LENGTH).kl for picks in everywhere]
    for one, kl in zip(predicted, measured, strict=True):
        assert 1 / 4 < one / kl < 4, (predicted, measured)
    assert np.argsort(predicted).tolist() == np.argsort(measured).tolist()
    assert ratio(measurement, everywhere[0], LENGTH) == pytest.approx(5.0)


def test_a_budget_that_cannot_be_met_is_exact_and_says_so(measurement: Measurement) -> None:
    poor = choose_and_verify(measurement, replace(SETTINGS, budget=1e-12))
    assert not poor.met
    assert poor.plan.is_exact
    assert poor.plan.verified is None
    assert "cannot be met" in poor.sentence
    assert poor.sentence.endswith("the plan is exact")


def test_no_saving_means_no_plan(model: LlamaForCausalLM, text: list[Path]) -> None:
    dear = letter_prices(**{label: 2.0 for label in CHOICES if label != "exact"})
    found = calibrate(model, encode, text, SETTINGS, prices=dear)
    assert found.plan.is_exact
    assert "no candidate within the budget saves time on this machine; longer --lengths (now 192)" in found.sentence
    assert found.report["price_plan_seconds"] == found.report["price_exact_seconds"]
    assert 0.0 <= found.report["rounding"] < 1e-6, "two exact kernels in float32"


def test_the_first_failure_ends_the_sequence_and_the_last_that_passed_is_the_plan(
    measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third candidate would pass for sure; nothing is learned of it once the second has failed."""
    real = verify.judge

    def harsh(*given: Any, number: int, **kwargs: Any) -> Any:
        asked.append(number)
        said = {"passed": number != fails, "sentence": "passed" if number != fails else "failed: the test says so"}
        return replace(real(*given, number=number, **kwargs), **said)

    monkeypatch.setattr(verify, "judge", harsh)
    for fails in (2, 1):
        asked: list[int] = []
        found = choose_and_verify(measurement)
        assert asked == [*range(1, fails + 1)]
        assert found.met == (fails == 2)
    assert found.plan.is_exact
    assert "the first candidate failed: the test says so; " in found.sentence


@pytest.mark.parametrize(
    ("loss", "kl", "remedy"),
    [
        (Ratio(5e-4, 5e-4, 8), 1e-4, "about 4 times as much held-out text would change that: its mean"),
        (Ratio(2e-3, 5e-4, 8), 1e-4, "more held-out text would not change that; a larger budget"),
        (Ratio(5e-4, 5e-4, 8), 2e-3, "more held-out text would not change that; a larger budget"),
    ],
    ids=["the bound alone", "the loss itself", "the KL"],
)
def test_what_would_change_a_failure_is_said(loss: Ratio, kl: float, remedy: str, result: Calibration) -> None:
    assert result.plan.verified is not None
    failed = replace(result.plan.verified, passed=False, delta_nll=loss.mean, upper=loss.upper(0.95), kl=kl, top1=1.0)
    assert verify.Proof({LENGTH: failed}, {}, loss).remedy(Gates(1e-3)).startswith(remedy)


def test_a_larger_budget_never_returns_less_than_a_smaller_one(
    measurement: Measurement, result: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a smaller budget proved on this text is the first candidate, and the answer where all others fail."""
    small = result
    assert small.plan.verified is not None
    real = verify.judge
    later: Any = lambda *given, number, **more: replace(  # noqa: E731
        real(*given, number=number, **more), **({} if number == 1 else {"passed": False, "sentence": "failed: so"})
    )
    monkeypatch.setattr(verify, "judge", later)
    settings = replace(SETTINGS, budget=1.5 * SETTINGS.budget)
    larger = choose_and_verify(measurement, settings, [small.plan])
    assert (larger.plan.layers, larger.plan.budget) == (small.plan.layers, settings.budget)
    assert larger.plan.verified is not None
    assert larger.plan.verified.upper == small.plan.verified.upper
    # neither what was not proven, nor what was proven of other weights, text or lengths, nor for a larger budget
    others = (
        {"verified": None}, {"verified": replace(small.plan.verified, confidence=0.9)}, {"dtype": "bfloat16"},
        {"weight_hash": "model:other"}, {"data_fingerprint": "ab"}, {"lengths": (64,)}, {"seed": 7},
        {"budget": settings.budget},
    )  # fmt: skip
    again = replace(measurement, inputs=measurement.inputs.with_settings(settings))
    for change in others:
        assert proven_candidates(again, [replace(small.plan, **change)], {}) == [], change
    assert len(proven_candidates(again, [small.plan], {})) == 1


@pytest.mark.parametrize("part", ["mlp", "head", "tokens"])
def test_an_interrupted_run_goes_on_with_the_same_weights_and_tokens_alone(
    part: str, text: list[Path], tmp_path: Path
) -> None:
    """Risks depend on all weights; the hashes of a plan's layers are those of attention alone."""
    model, few = lettered_llama(), replace(SETTINGS, sequences=1, rows=8, labels=1)
    measure(open_inputs(model, encode, text, few, directory=tmp_path), prices=letter_prices())
    measure(open_inputs(model, encode, text, few, directory=tmp_path, resume=True), prices=letter_prices())
    with torch.no_grad():
        if part == "mlp":
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        elif part == "head":
            model.lm_head.weight.mul_(1.5)
    read = (lambda t: encode(t.upper())) if part == "tokens" else encode
    other = open_inputs(model, read, text, few, directory=tmp_path, resume=True)
    with pytest.raises(ValueError, match="belongs to another model, text or settings"):
        measure(other, prices=letter_prices())


def test_a_disk_that_fills_up_leaves_the_models_configuration_whole(
    result: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lettered_llama().save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    (tmp_path / FILE).write_bytes(b"hours of work")

    def full(self: Any, path: Any, **_: Any) -> None:
        Path(path).write_text('{"archit')
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedConfig, "to_json_file", full)
        with pytest.raises(OSError, match="No space left"):
            save_plan(lettered_llama(), result, tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before
    assert (tmp_path / FILE).is_file()
    save_plan(lettered_llama(), result, tmp_path)
    assert Plan.from_pretrained(tmp_path) == result.plan
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_model_whose_losses_are_no_numbers_is_refused(text: list[Path]) -> None:
    """Half precision overflows on some text: a KL to such predictions is 0, and kept every budget."""
    broken = lettered_llama()
    with torch.no_grad():
        broken.lm_head.weight[5].fill_(float("nan"))
    with pytest.raises(ValueError, match=r"exact attention gives \d+ of \d+ tokens a loss of nan or infinity"):
        calibrate(broken, encode, text, SETTINGS, prices=letter_prices())
    arms, window = ModelArms(broken), next_token(np.arange(LENGTH) % 128)
    with pytest.raises(ValueError, match=f"exact attention gives {LENGTH - 1} of {LENGTH - 1} tokens"):
        compare(arms, window, exact_tap)
    arms, exact = ModelArms(lettered_llama()), torch.zeros(1, LENGTH, 64)
    with pytest.raises(ValueError, match=f"the plan gives {LENGTH - 1} of {LENGTH - 1} tokens"):
        compare(arms, window, lambda module, call: exact_tap(module, call) * math.nan, exact)


@pytest.mark.parametrize(("name", "value"), [
    ("budget", 0.0), ("budget", math.nan), ("budget", math.inf),
    ("needles_lost", -0.1), ("needles_lost", 1.0), ("alpha", 0.0), ("alpha", 1.0),
])  # fmt: skip
def test_a_limit_that_is_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}, expected"):
        replace(SETTINGS, **{name: value})


def test_a_plan_of_another_major_version_is_refused(result: Calibration) -> None:
    with pytest.raises(PlanError, match="another major version"):
        attach.load_plan(lettered_llama(), replace(result.plan, transformers="4.57.0"))


def test_int8_tensors_are_stored_and_read(
    model: LlamaForCausalLM, text: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = letter_prices(**{"int8": 0.01})
    settings = replace(SETTINGS, families=("int8",), budget=0.5)
    found = choose_and_verify(measure(open_inputs(model, encode, text, settings), cheap))
    assert found.met, found.sentence
    assert found.plan.tensors
    fresh = lettered_llama()
    save_plan(fresh, found, tmp_path)
    fresh.save_pretrained(tmp_path)
    tokens = torch.randint(0, 128, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = fresh(tokens).logits
    monkeypatch.setattr(store, "_tensors", {})
    loaded = attach.load_plan(LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="adaattn"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, wanted)


def test_comparing_an_arm_with_itself_gives_nothing(model: LlamaForCausalLM) -> None:
    tokens = torch.randint(0, 128, (1, 64), generator=torch.Generator().manual_seed(0))
    scores = compare(ModelArms(model), next_token(tokens[0].numpy()), exact_tap)
    assert np.abs(scores.delta).max() == 0
    assert np.abs(scores.kl).max() < 1e-12
    assert scores.agree.all()
    with torch.no_grad():
        stock = torch.nn.functional.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
    torch.testing.assert_close(torch.from_numpy(scores.nll[0]).float(), stock, atol=1e-5, rtol=1e-5)


def lossy(lost: Callable[[np.ndarray], int]) -> Callable[..., Joint]:
    """Measures whole plans as they are, but for the needles that picks lose of 48."""
    measured = search.joint

    def joint(measurement: Measurement, picks: np.ndarray, *given: Any) -> Joint:
        return replace(measured(measurement, picks, *given), needles=(lost(picks), 0, 48))

    return joint


def test_a_plan_that_loses_needles_is_tamed_before_its_proof(
    measurement: Measurement, result: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head retrieves: it is made exact, the others stay as they were, and the first proof passes."""
    measurement = replace(measurement, state=copy.deepcopy(measurement.state))
    assert {len(layer.choices) - layer.choices.count(EXACT) for layer in result.plan.layers} == {2}
    needles = np.full((4, len(CHOICES)), 1e-3)
    needles[2], needles[:, 0] = 1.0, 0.0
    measurement.state.needles[LENGTH] = needles
    monkeypatch.setattr(search, "joint", lossy(lambda picks: 20 * bool(picks[2])))
    tamed = choose_and_verify(measurement, SETTINGS)
    steps = [step["needles"] for step in tamed.report["history"] if "needles" in step]
    assert [(20, 0, 48)] in steps
    assert tamed.met, tamed.sentence
    assert next(step["verified"]["passed"] for step in tamed.report["history"] if "verified" in step)
    assert [[choice.is_exact for choice in layer.choices] for layer in tamed.plan.layers] == [
        [False] * 2,
        [True, False],
    ]
    # nothing that saves time keeps them: no text is spent on a proof
    monkeypatch.setattr(search, "joint", lossy(lambda picks: 20))
    none = choose_and_verify(measurement, SETTINGS)
    assert (none.met, [step for step in none.report["history"] if "verified" in step]) == (False, [])
    assert "keeps the needles in the calibration text; --needles allows more" in none.sentence


def test_risks_for_retrieval_that_overflow_forbid_a_choice_once_needles_are_lost(
    model: LlamaForCausalLM, text: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = measuring._risks_of_window

    def overflown(inputs: Inputs, layers: Any, window: TokenWindow, *given: Any) -> tuple[np.ndarray, np.ndarray]:
        sums, dropped = real(inputs, layers, window, *given)
        if window.positions is not None:
            sums[2] = [np.nan, *[np.inf] * (len(CHOICES) - 1)]
        return sums, dropped

    monkeypatch.setattr(measuring, "_risks_of_window", overflown)
    measurement = measure(open_inputs(model, encode, text, SETTINGS), prices=letter_prices())
    assert measurement.state.needles[LENGTH][2].tolist() == [0.0, *[math.inf] * (len(CHOICES) - 1)]
    monkeypatch.setattr(search, "joint", lossy(lambda picks: 20 * bool(picks[2])))
    tamed = choose_and_verify(measurement, SETTINGS)
    assert tamed.met, tamed.sentence
    assert [[choice.is_exact for choice in layer.choices] for layer in tamed.plan.layers][1] == [True, False]


def test_heads_that_retrieve_are_told_by_their_risk(model: LlamaForCausalLM, text: list[Path], tmp_path: Path) -> None:
    """Nothing is lost by exact attention, nor within a layer that later ones do not hear."""
    deaf = lettered_llama()
    with torch.no_grad():
        deaf.model.layers[1].self_attn.o_proj.weight[:, :64] = 0.0  # the two query heads of the first key/value head
    measurement = measure(open_inputs(deaf, encode, text, SETTINGS, directory=tmp_path), prices=letter_prices())
    risks = measurement.state.needles[LENGTH]
    assert (risks[:, 0] == 0.0).all()
    assert (risks[2] == 0.0).all()
    assert (risks[[0, 1, 3]][:, 1:] > 0.0).all()
    picks = np.array([4, 0, 4, 4])
    joint = search.joint(measurement, picks, LENGTH)
    assert joint.risk == pytest.approx(risks[[0, 3], 4].sum())
    kept = measure(open_inputs(deaf, encode, text, SETTINGS, directory=tmp_path, resume=True), prices=letter_prices())
    assert (kept.state.needles[LENGTH] == risks).all()
    measurement.state.save(tmp_path, RISKS_FILE)
    known = CalibrationState.read(tmp_path)
    taken = measure(open_inputs(deaf, encode, text, SETTINGS, earlier=known), prices=letter_prices())
    assert (taken.state.needles[LENGTH] == risks).all()


def test_needles_that_are_lost_end_the_sequence_and_say_so(
    measurement: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "joint", lossy(lambda picks: 0))
    monkeypatch.setattr("adaattn_hf.eval.needles.retrieved", lambda _, hay, tap: (tap is exact_tap,) * len(hay.answers))
    fresh = replace(measurement, inputs=replace(measurement.inputs, retrieved={}))
    failed = choose_and_verify(fresh, replace(SETTINGS, needles_lost=0.0))
    assert not failed.met
    assert "the first candidate failed: 2 of 2 needles are lost, more than 0; more held-out text" in failed.sentence


def test_risks_that_are_half_of_the_loss_end_in_a_plan(measurement: Measurement) -> None:
    measurement = replace(measurement, state=copy.deepcopy(measurement.state))
    measurement.state.total[LENGTH] *= 0.5
    result = choose_and_verify(measurement)
    assert result.met, result.sentence
    assert result.plan.verified is not None
    assert result.plan.verified.upper <= SETTINGS.budget


def test_labels_are_drawn_as_often_as_they_are_likely() -> None:
    chances = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 1.0, 0.0]])
    drawn = fisher.drawn_labels(chances.log(), 20_000, torch.Generator().manual_seed(0))
    seen = torch.stack([(drawn == label).double().mean(-1) for label in range(4)], dim=-1)
    assert (seen - chances).abs().max() < 4 * 0.5 / 20_000**0.5
    assert (seen[chances == 0] == 0).all()


def _measured(model: PreTrainedModel, tokens: Tensor, rows: int, labels: int) -> dict[int, Any]:
    found: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(3)
    fisher.measure(
        ModelArms(model), next_token(tokens[0].numpy()), [make_choice("window", 8), make_choice(precision="int8")], {},
        labels=labels, rows=stratified_rows(tokens.shape[1], rows, generator), generator=generator,
        report=lambda i, *layer: found.update({i: layer}),
    )  # fmt: skip
    return found


def test_statistics_equal_those_of_the_whole_graph(model: LlamaForCausalLM) -> None:
    """g is the gradient of the sampled log-likelihood with respect to the attention output, as autograd has it."""
    tokens = torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    found = _measured(model, tokens, 40, 2)
    assert list(found) == [1, 0]
    assert all(parameter.requires_grad for parameter in model.parameters())
    seen: list[tuple[Any, Tensor]] = []

    def tap(module: Any, call: Any) -> Tensor:
        seen.append((call, exact_tap(module, call)))
        return seen[-1][1]

    with tapping(tap):
        likelihood = model(tokens).logits[0].log_softmax(-1)
    generator, places = torch.Generator().manual_seed(3), torch.arange(40)
    stratified_rows(40, 40, generator)
    labels = fisher.drawn_labels(likelihood.detach(), 2, generator)
    outs = [out for _, out in seen]
    for label in range(2):
        gradients = torch.autograd.grad(likelihood.gather(1, labels[:, [label]]).sum(), outs, retain_graph=True)
        for layer, (call, _) in enumerate(seen):
            every = [EXACT, make_choice("window", 8), make_choice(precision="int8")]
            outputs, dropped = row_outputs(call, places, every, LayerTensors())
            wanted = ((outputs[1:] - outputs[:1]) * gradients[layer][0].transpose(0, 1)).sum(-1)
            assert wanted.abs().max() > 1e-4
            torch.testing.assert_close(found[layer][0][label], wanted, atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(found[layer][1], dropped[1:])


def test_rows_that_have_no_room_together_are_measured_in_pieces(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, sizes = torch.randint(0, 128, (1, 150), generator=torch.Generator().manual_seed(0)), []
    room = [30]

    def few(call: Any, rows: Tensor, *more: Any) -> Any:
        sizes.append(len(rows))
        if len(rows) > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return row_outputs(call, rows, *more)

    whole = _measured(model, tokens, 100, 1)
    monkeypatch.setattr(fisher, "row_outputs", few)
    pieces = _measured(model, tokens, 100, 1)
    assert sizes == [100, 50, 25, 25, 50, 25, 25] * 2
    for layer, parts in whole.items():
        for one, other in zip(parts, pieces[layer], strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    room[0] = 3
    with pytest.raises(torch.OutOfMemoryError):
        _measured(model, tokens, 100, 1)


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_a_layer_is_computed_again_for_each_label_and_measured_once(
    labels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls, measured = lettered_llama(), [], Mock(side_effect=row_outputs)
    monkeypatch.setattr(fisher, "row_outputs", measured)
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, at=at: calls.append((at, torch.is_grad_enabled())))
    _measured(model, torch.arange(40)[None] % 128, 40, labels)
    assert [at for at, grad in calls if grad] == [0, 1, *[1, 0] * labels]
    assert measured.call_count == 2


def test_ways_back_run_in_the_thread_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a GPU run in threads of torch's, which have no listeners, unless that is switched off."""
    model, tokens, backward = lettered_llama(), torch.arange(40)[None] % 128, torch.autograd.backward
    wanted = _measured(model, tokens, 40, 2)

    def by_device(*args: Any, **kwargs: Any) -> None:
        if not torch._C._is_multithreading_enabled():
            return backward(*args, **kwargs)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(backward, *args, **kwargs).result()

    monkeypatch.setattr(torch.autograd, "backward", by_device)
    torch.testing.assert_close(_measured(model, tokens, 40, 2), wanted)
    assert torch._C._is_multithreading_enabled()


def test_weights_that_are_brought_for_a_layer_are_let_go_on_the_way_back() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, tokens = lettered_llama(), torch.arange(40)[None] % 128
    wanted = _measured(model, tokens, 40, 2)
    for layer in model.model.layers:
        accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))
    torch.testing.assert_close(_measured(model, tokens, 40, 2), wanted)
    assert all(weight.is_meta for weight in model.model.layers.parameters())


def test_attention_that_stands_for_itself_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT's ends with its output, so that its gradients come before it is computed again."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=128, attn_implementation="adaattn", **sizes)
    model, tokens = BertForMaskedLM(config).eval(), torch.arange(40)[None] % 128
    wanted = _measured(model, tokens, 40, 2)
    monkeypatch.setattr("adaattn_hf.eval.arms.layers_of", lambda _, attentions: attentions)
    torch.testing.assert_close(_measured(model, tokens, 40, 2), wanted)


def test_layers_that_pass_on_or_change_what_they_are_given_keep_their_gradients() -> None:
    """A tensor that comes back as it is, one that is changed in place behind a layer, and one that two layers read."""

    class Body(torch.nn.Module):
        def forward(self, hidden: Tensor, first: Tensor) -> dict[str, Any]:
            return {"hidden": (hidden * first).tanh() * 3, "first": first, "words": "as they are"}

    body, start = Body(), torch.linspace(0.1, 1.0, 6, requires_grad=True)

    def run() -> tuple[Tensor, Tensor]:
        x = start * 2
        one = body(x, x + 1)
        one["hidden"] += one["first"]
        two = body(one["hidden"], first=one["first"])
        assert two["words"] == "as they are"
        return x, two["hidden"] * one["hidden"]

    def gradients() -> list[Tensor]:
        x, out = run()
        return [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in (torch.ones(6), torch.arange(6.0))]

    wanted = gradients()
    with fisher.recomputed([body]):
        assert "forward" in vars(body)
        found = gradients()
    assert "forward" not in vars(body)
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)


def _held(run: Callable[[], object]) -> list[int]:
    """The bytes that torch held from time to time, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    return list(accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())))


def _peak(run: Callable[[], object]) -> int:
    return max(_held(run))


def test_memory_grows_with_one_layer() -> None:
    """Of each further layer there is its input, and the gradients of the sampled rows."""
    tokens = torch.arange(512)[None] % 128
    few, many = (_peak(partial(_measured, lettered_llama(layers), tokens, 64, 2)) for layers in (2, 8))
    assert many - few < 6 * 2 * (512 * 64 * 4), (few, many)


def test_the_peak_is_told_beforehand(text: list[Path]) -> None:
    model = lettered_llama(layers=6)
    inputs = open_inputs(model, encode, text, replace(SETTINGS, lengths=(512,)))
    layers = observe_layers(inputs)
    weights, need = forecast(inputs, layers)
    held = _held(partial(forecast, inputs, layers))
    assert held[-1] < max(held) / 100, "what it looked at is let go"
    peak = _peak(partial(_measured, model, torch.tensor([inputs.samples[512]["risk"][0].tokens]), 48, 2))
    assert 0.8 < (need - weights) / peak < 1.4, (need, peak)
    assert memory_words(512, weights, need, None).startswith("memory: about ")
    assert memory_words(512, weights, need, need - 1).endswith(": --lengths 256 would fit")


def test_samples_are_disjoint_and_depend_on_the_seed(text: list[Path]) -> None:
    first = draw(text, encode, 64, {"a": 3, "b": 4}, 0)
    again = draw(text, encode, 64, {"a": 3, "b": 4}, 0)
    assert first == again
    everything = [sequence.tokens for part in first[0].values() for sequence in part]
    assert len(set(everything)) == 7
    assert draw(text, encode, 64, {"a": 3, "b": 4}, 1)[0] != first[0]
    with pytest.raises(ValueError, match="give more text"):
        draw(text, encode, 64, {"a": 10_000}, 0)


def test_a_key_of_two_values_may_bring_either_to_mind() -> None:
    """64 needles to a length by default, a quarter of them with the key of another one."""
    settings = CalibrationSettings()
    assert settings.haystacks * min(settings.needles, most(1024)) == 64
    haystack = build(torch.arange(1024), 16, torch.Generator().manual_seed(0))
    keys = [tuple(haystack.tokens[at - 6 : at].tolist()) for at in haystack.answers]
    assert (len(haystack.tokens), keys[8:12]) == (1024, keys[:4])
    assert len(set(keys)) == 12
    assert [len(own) for own in haystack.likely] == [2] * 4 + [1] * 4 + [2] * 4 + [1] * 4
    windows = haystack.tokens.unfold(0, 10, 1)
    every = [(windows == haystack.tokens[at - 6 : at + 4]).all(1).nonzero()[:, 0] for at in haystack.answers]
    assert [len(places) for places in every] == [2] * 16, "in the haystack, and asked for"
    assert [int(every[i + 8][0] - every[i][0]) for i in range(4)] == [(1024 - 160) // 2] * 4, "half a haystack apart"

    class Arms:
        """Answers every question by the value that the key had first, and the rest as it is."""

        device = torch.device("cpu")

        def hidden(self, asked: TokenWindow) -> Tensor:
            right = torch.from_numpy(asked.input_ids)[None].roll(-1, 1)
            for index in range(8, 12):
                right[0, haystack.answers[index] - 1] = haystack.tokens[haystack.answers[index - 8]]
            return right[:, asked.rows]

        def logits(self, hidden: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(hidden, 1024).float()

    arms: Any = Arms()
    assert all(retrieved(arms, haystack, exact_tap))
    wrong = replace(haystack, likely=tuple(own[-1:] for own in haystack.likely))
    assert retrieved(arms, wrong, exact_tap) == (False,) * 4 + (True,) * 4 + (False,) * 4 + (True,) * 4


def test_lost_needles_refuse_a_plan_that_keeps_the_loss() -> None:
    scores = TokenScores(np.zeros((2, 10)), np.zeros((1, 10)), np.ones((2, 10), bool), np.ones((1, 10), bool))
    read = [TokenSequence(str(index), ()) for index in range(4)]
    evidence = verify.Evidence.of(read, [scores] * 4, [(True, True)] * 8)
    kwargs: dict[str, Any] = {"confidence": 0.95, "number": 1, "activation_share": (1.0, 1.0), "predicted": 0.0}
    assert verify.judge(evidence, Gates(1e-3), **kwargs).passed
    evidence = replace(evidence, needles=[*[(True, True)] * 10, *[(True, False)] * 6])
    verdict = verify.judge(evidence, Gates(1e-3), **kwargs)
    assert not verdict.passed
    assert "6 of 16 needles are lost" in verdict.sentence


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("0.1%", math.log(1.001)), ("1e-3", 1e-3), (" 1 %", math.log(1.01)), ("0.1 nats/token", 0.1), ("0.01nats", 0.01)],
)
def test_budgets(given: str, wanted: float) -> None:
    assert read_budget(given)[1] == pytest.approx(wanted)


def test_a_bare_number_that_may_be_meant_in_percent_is_refused_with_both_readings() -> None:
    for bare in ("0.01", "0.1", "0.5"):
        with pytest.raises(ValueError, match=rf"write {bare}% \(a rise .* by {bare} %\) or {bare}nats \(nats/token, a"):
            read_budget(bare)
    assert read_budget("0.009") == ("0.009nats", 0.009)


@pytest.mark.parametrize("bad", ["", "much", "0", "-1%", "5"])
def test_bad_budgets(bad: str) -> None:
    with pytest.raises(ValueError, match="budget is"):
        read_budget(bad)


def test_stock_attention_is_refused_for_calibration(text: list[Path]) -> None:
    model = lettered_llama()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="expected 'adaattn'"):
        calibrate(model, encode, text, SETTINGS, prices=letter_prices())
