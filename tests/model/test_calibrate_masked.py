"""Calibration of masked-language models: what is scored, what a choice costs, the proof, and where the plan goes."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import adaattn_hf
from adaattn_hf.attention.listeners import tapping
from adaattn_hf.calibration import fisher, inputs
from adaattn_hf.calibration.calibrate import choose_and_verify, report
from adaattn_hf.calibration.layers import Measurement, unit_prices
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.settings import Calibration, CalibrationSettings
from adaattn_hf.eval.arms import ModelArms, compare, plan_tap
from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages
from adaattn_hf.eval.objectives import MaskedTokens, NextToken
from adaattn_hf.eval.windows import TokenWindow
from adaattn_hf.patches.models.positions import learned_positions, trained_positions
from adaattn_hf.patches.plans import attach, hashes
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.plans.choices import Setting
from adaattn_hf.plans.choices.window import WINDOWS, WINDOWS_BOTH_WAYS
from adaattn_hf.plans.plan import EXACT, Choice, LayerPlan, Plan, PlanError
from adaattn_hf.policy.candidates import candidates
from adaattn_hf.policy.knapsack import SolverTable, evaluate
from adaattn_hf.policy.prices import Price, PriceTable
from studies.budget import ratio

from ..support.calibration import calibrate, open_inputs, price_table, save_plan
from ..support.choices import make_choice
from ..support.command import adaattn
from ..support.interrupting import failing

LENGTH = 256
SETTINGS = CalibrationSettings(
    budget=2e-2, lengths=(LENGTH,), sequences=2, rows=64, labels=2, joint=2, held_out=6, rounds=0,
    families=("window", "bf16", "rank"), windows=(32, 64),
)  # fmt: skip


def prices(**seconds: float) -> PriceTable:
    """A table without decode, in which windows cost a third, bf16 half and ranks as much as exact attention."""
    cost = {"exact": 1.0, "bf16": 0.5, "w32+16": 0.3, "w64+16": 0.4, "w32+16 bf16": 0.2, "w64+16 bf16": 0.25}
    cost |= {"r16": 0.95, **seconds}
    return price_table(LENGTH, cost, decode=False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tf.AutoTokenizer.from_pretrained(demo_model_path("bert"))


@pytest.fixture(scope="module")
def encode(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids


@pytest.fixture(scope="module")
def scoring(tokenizer: Any) -> MaskedTokens:
    return MaskedTokens.of(tokenizer, count=2)


def bert(implementation: str = "adaattn") -> Any:
    return tf.AutoModelForMaskedLM.from_pretrained(
        demo_model_path("bert"), attn_implementation=implementation, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return bert()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("text") / "pages.jsonl"
    pages = [*calibration_pages()[:5], *heldout_pages()[:10]]
    path.write_text("\n".join(json.dumps({"text": page}) for page in pages), encoding="utf-8")
    return [path]


@pytest.fixture(scope="module")
def measured(model: Any, encode: Any, text: list[Path], scoring: MaskedTokens) -> Measurement:
    return measure(open_inputs(model, encode, text, SETTINGS, scoring=scoring), prices=prices())


@pytest.fixture(scope="module")
def result(measured: Measurement) -> Calibration:
    return choose_and_verify(measured)


@pytest.fixture(scope="module")
def ids(encode: Any) -> list[int]:
    return list(encode(heldout_pages()[3])[: LENGTH - 2])


def test_windows_mask_disjoint_seeded_shares_and_no_special_token(ids: list[int], tokenizer: Any) -> None:
    scoring = MaskedTokens.of(tokenizer, count=6)
    windows = scoring.windows(ids, 0)
    whole = np.array([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id])
    assert scoring.content(LENGTH) == len(ids) == len(whole) - 2
    places: list[int] = []
    for window in windows:
        assert window.positions is not None
        assert len(window.positions) == round(0.15 * len(ids))
        assert window.rows_per_prediction == pytest.approx(LENGTH / len(window.positions))
        masked = window.input_ids == tokenizer.mask_token_id
        assert np.flatnonzero(masked).tolist() == window.positions.tolist()
        assert np.array_equal(window.input_ids[~masked], whole[~masked])
        assert np.array_equal(window.targets, whole[window.positions])
        places += window.positions.tolist()
    assert len(set(places)) == len(places), "six shares of 15 % fit without overlap"
    assert 0 not in places
    assert LENGTH - 1 not in places
    again, other = scoring.windows(ids, 0), scoring.windows(ids, 1)
    assert all(np.array_equal(one.input_ids, two.input_ids) for one, two in zip(windows, again, strict=True))
    assert not any(np.array_equal(one.input_ids, two.input_ids) for one, two in zip(windows, other, strict=True))
    assert len(MaskedTokens(4, count=9).windows(ids, 0)) == 9, "more windows than shares begin anew"


def test_scores_are_the_models_own_at_masked_places(model: Any, ids: list[int], scoring: MaskedTokens) -> None:
    """Against stock attention and the whole model's logits, one loop per token."""
    window = scoring.windows(ids, 0)[0]
    tokens = torch.from_numpy(window.input_ids)[None]
    choices = {layer: make_choice("window", 16, 4) for layer in range(4)}
    tap = plan_tap({layer: _bound_layer(layer, choice) for layer, choice in choices.items()})
    scores = compare(ModelArms(model), window, tap)
    with torch.no_grad():
        stock = bert("eager")(input_ids=tokens).logits[0].double().log_softmax(-1)
        with tapping(tap):
            planned = model(input_ids=tokens).logits[0].double().log_softmax(-1)
    for at, place in enumerate(window.rows.tolist()):
        target = int(window.targets[at])
        assert float(scores.nll[0, at]) == pytest.approx(-float(stock[place, target]), abs=1e-4)
        assert float(scores.nll[1, at]) == pytest.approx(-float(planned[place, target]), abs=1e-4)
        kl = float((stock[place].exp() * (stock[place] - planned[place])).sum())
        assert float(scores.kl[0, at]) == pytest.approx(kl, abs=1e-4)
        assert bool(scores.agree[0, at]) == bool(stock[place].argmax() == planned[place].argmax())
    assert scores.kl.shape[1] == len(window.rows)
    assert float(scores.kl.mean()) > 1e-3, "the plan changes something"


def _bound_layer(layer: int, choice: Choice, heads: int = 5, only: int | None = None) -> Any:
    from adaattn_hf.plans.bound_layer import BoundLayer
    from adaattn_hf.plans.tensors import LayerTensors

    chosen = tuple(choice if only in (None, head) else EXACT for head in range(heads))
    return BoundLayer(LayerPlan(layer, "", chosen), LayerTensors(), 512)


@pytest.mark.parametrize("family", ["bert", "electra", "roberta"])
def test_a_head_that_transforms_is_reached_through_the_models_forward(family: str) -> None:
    small = {
        "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    made: Any = {
        "bert": bert,
        "electra": lambda: tf.ElectraForMaskedLM(tf.ElectraConfig(**small, embedding_size=16)).eval(),
        "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**small)).eval(),
    }[family]()
    tokens = torch.randint(4, 40, (1, 30), generator=torch.Generator().manual_seed(0))
    arms = ModelArms(made)
    places, ids = np.array([3, 17, 20]), tokens[0].numpy()
    with torch.no_grad():
        states = arms.hidden(TokenWindow("", ids, places, ids[places]))
        assert states.shape == (1, 3, made.config.hidden_size), "states, not logits, are kept"
        torch.testing.assert_close(arms.logits(states), made(tokens).logits[:, places], atol=1e-5, rtol=1e-5)


def test_the_risk_of_single_heads_is_their_measured_kl(
    model: Any, encode: Any, text: list[Path], scoring: MaskedTokens
) -> None:
    """Nats per masked token: a risk per row would be seven times too small."""
    settings = replace(SETTINGS, sequences=2, rows=LENGTH, labels=2, families=("window",), windows=(32,))
    measured = measure(open_inputs(model, encode, text, settings, scoring=scoring), prices=prices())
    risks = measured.risks()[0][:, 1]
    heads = np.argsort(-risks)[[0, 3]]
    sequences = measured.inputs.samples[LENGTH]["held_out"][:5]
    for unit in heads:
        layer, head = measured.layers.units[unit]
        tap = plan_tap({layer: _bound_layer(layer, make_choice("window", 32, 16), only=head)})
        kl = np.mean(
            [
                float(compare(measured.inputs.arms, window, tap).kl.mean())
                for sequence in sequences
                for window in measured.inputs.windows(sequence)
            ]
        )
        assert 1 / 2.5 < risks[unit] / kl < 2.5, (layer, head, risks[unit], kl)


def test_candidates_that_look_both_ways() -> None:
    assert MaskedTokens(4).spans(WINDOWS) == WINDOWS_BOTH_WAYS
    assert MaskedTokens(4).spans((40,)) == (40,)
    assert NextToken().spans(WINDOWS) == WINDOWS
    found = candidates(Setting(512, 32, "float32", ("window",), WINDOWS_BOTH_WAYS, causal=False)).choices
    assert [getattr(choice.keys, "window", 0) for choice in found] == [0, 32, 64, 128]
    found = candidates(Setting(512, 32, "float32", ("window",), WINDOWS)).choices
    assert [getattr(choice.keys, "window", 0) for choice in found] == [0, 128, 256]


def test_layers_with_a_window_of_their_own_have_prices_of_their_own(encode: Any, text: list[Path]) -> None:
    """Half of this model looks 16 tokens around: what a choice saves there is little, and a wider window nothing."""
    torch.manual_seed(0)
    config = tf.ModernBertConfig(
        vocab_size=4096, hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
        local_attention=32, global_attn_every_n_layers=2, pad_token_id=0, eos_token_id=3, bos_token_id=2,
        cls_token_id=2, sep_token_id=3, initializer_range=0.1,
    )  # fmt: skip
    config._attn_implementation = "adaattn"
    hybrid = tf.ModernBertForMaskedLM(config).eval()
    cost = {"exact": 8.0, "bf16": 4.0, "w8+16": 2.0, "w8+16 bf16": 1.0, "w32+16": 3.0, "w32+16 bf16": 1.5}
    # its own window of 17 keys each way leaves as much to every choice
    row = cost | {f"{label} in 17": value / 8 for label, value in cost.items()}
    table = price_table(LENGTH, row, decode=False)
    settings = replace(SETTINGS, families=("window", "bf16"), windows=(8, 32), sequences=1, held_out=2)
    scoring = MaskedTokens(4, (2,), (3,), count=1)
    measured = measure(open_inputs(hybrid, encode, text, settings, scoring=scoring), prices=table)
    assert measured.layers.kinds == {0: None, 1: 17, 2: None, 3: 17}
    labels = [choice.label for choice in measured.layers.candidates.choices]
    wide, exact, bf16 = (labels.index(label) for label in ("w32+16", "exact", "bf16"))
    local, whole = measured.prices[2], measured.prices[0]
    assert local[exact] == 1.0
    assert local[wide] == np.inf, "a window that is no narrower is no choice"
    assert whole[wide] == 3.0
    # of 4 layers with 2 heads each, two pay 8 and two pay 1
    picks = np.full(8, bf16)
    assert ratio(measured, picks, LENGTH) == pytest.approx(2.0)
    picks[[2, 3, 6, 7]] = exact
    assert ratio(measured, picks, LENGTH) == pytest.approx((8 + 8 + 1 + 1) / (4 + 4 + 1 + 1))
    # the report tells the same, also of what a launch costs in layers of either kind
    lines = price_table(LENGTH, {name: Price(one, one / 2) for name, one in row.items()}, decode=False)
    told = unit_prices(lines, measured.layers, [LENGTH], "prefill")
    both = replace(measured, table=lines, prices=told[0], launches=told[1])
    words = report(both, [], evaluate(picks, told[0], both.risks(), told[1]), np.ones(1), [])
    assert words["price_exact_seconds"] == pytest.approx(2 * (8 + 8) + 2 * (1 + 1))
    assert words["price_plan_seconds"] == pytest.approx(2 * (4 + 4) + 2 * (1 + 1))
    assert ratio(both, picks, LENGTH) == pytest.approx(36 / 20)
    again = SolverTable.from_dict(json.loads(json.dumps(words["table"])))
    assert np.array_equal(again.launches.constant, told[1].constant)
    assert evaluate(picks, again.prices, again.risks, again.launches).price == words["price_plan_seconds"]
    timed = measure(open_inputs(hybrid, encode, text, replace(settings, families=("bf16",)), scoring=scoring))
    assert set(timed.table.prices["prefill"][LENGTH]) == {"exact", "bf16", "exact in 17", "bf16 in 17"}


def test_a_plan_passes_and_says_what_was_not_asked(result: Calibration) -> None:
    assert result.met, result.sentence
    verified = result.plan.verified
    assert verified is not None
    assert verified.upper <= SETTINGS.budget
    # 2 readings of each sequence, 15 % of 254 tokens
    assert verified.tokens == SETTINGS.held_out * 2 * 38
    assert verified.retrieval_stock is None
    assert verified.retrieval_plan is None
    assert 0.0 < verified.activation <= 1.0
    words = result.plan.protocol["scoring"]
    assert (words["mask_share"], words["maskings"]) == (0.15, 2)
    assert words["retrieval"] == "does not apply: nothing is generated"
    assert result.plan.protocol["settings"]["windows"] == [32, 64]
    assert Plan.from_json(result.plan.to_json()) == result.plan


def test_decode_is_neither_timed_nor_asked_for(
    model: Any, encode: Any, text: list[Path], scoring: MaskedTokens
) -> None:
    measured = measure(
        open_inputs(model, encode, text, replace(SETTINGS, families=("bf16",), sequences=1), scoring=scoring)
    )
    assert set(measured.table.prices) == {"prefill"}
    assert not measured.layers.calls[None][LENGTH].structure.causal
    assert measured.layers.calls[None][LENGTH].query.shape[2] == LENGTH


def test_an_interrupted_run_goes_on_and_other_maskings_do_not(
    model: Any, encode: Any, text: list[Path], scoring: MaskedTokens, measured: Measurement, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    calls = failing(fisher.measure, 4, KeyboardInterrupt())  # the second reading of the second sequence
    monkeypatch.setattr(fisher, "measure", calls)

    def again(scoring: MaskedTokens = scoring, resume: bool = True) -> Measurement:
        given = {"scoring": scoring, "directory": tmp_path, "resume": resume}
        return measure(open_inputs(model, encode, text, SETTINGS, **given), prices=prices())

    with pytest.raises(KeyboardInterrupt):
        again(resume=False)
    with pytest.raises(ValueError, match="another model, text or settings"):
        again(replace(scoring, share=0.2))
    resumed = again()
    assert calls.call_count == 6
    assert np.array_equal(resumed.risks(), measured.risks())


@pytest.fixture(scope="module")
def stored(result: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planned") / "bert"
    shutil.copytree(demo_model_path("bert"), directory)
    fresh = bert()
    save_plan(fresh, result, directory)
    return directory


def load(auto: Any, directory: Path) -> Any:
    model = auto.from_pretrained(directory, attn_implementation="adaattn", dtype=torch.float32).eval()
    return adaattn_hf.load_plan(model)


def test_the_plan_travels_to_the_model_its_encoder_and_a_task_head(
    stored: Path, result: Calibration, ids: list[int]
) -> None:
    tokens = torch.tensor([ids])
    expected = bert()
    attach.load_plan(expected, result.plan)
    bare = bert()
    with torch.no_grad():
        wanted = expected.bert(tokens).last_hidden_state
        exact = bare.bert(tokens).last_hidden_state
        assert float((wanted - exact).abs().max()) > 1e-3
        masked = load(tf.AutoModelForMaskedLM, stored)
        torch.testing.assert_close(masked(tokens).logits, expected(tokens).logits)
        torch.testing.assert_close(load(tf.AutoModel, stored)(tokens).last_hidden_state, wanted)
        classifier = load(tf.AutoModelForSequenceClassification, stored)
        torch.testing.assert_close(classifier.bert(tokens).last_hidden_state, wanted)
        assert adaattn_hf.plan_of(classifier) == result.plan
        classifier.bert.encoder.layer[1].attention.self.query.weight.mul_(1.01)
    for read in (lambda: classifier(tokens), lambda: adaattn_hf.load_plan(classifier)):
        with pytest.raises(PlanError, match=r"weights of (the model|layer 1) are not those"):
            read()


@torch.no_grad()
def test_a_padded_batch_is_its_sequences_alone(stored: Path, ids: list[int]) -> None:
    planned = load(tf.AutoModelForMaskedLM, stored)
    batch = torch.full((2, LENGTH), planned.config.pad_token_id)
    mask = torch.zeros_like(batch)
    for row, sequence in enumerate((ids, ids[40:200])):
        batch[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    alone = planned(torch.tensor([ids[40:200]])).logits
    for model in (planned, adaattn_hf.prepare(planned)):
        together = model(input_ids=batch, attention_mask=mask).logits[1:, :160]
        # bf16 heads round to bf16 in other launches
        torch.testing.assert_close(together, alone, atol=3e-2, rtol=3e-2)


def test_monitor_and_statistics_count_rows_that_lose_keys_on_either_side(model: Any, result: Calibration) -> None:
    watched = bert()
    window = make_choice("window", 32, 16)
    modules = dict(attention_modules(watched, "bert"))
    layer = LayerPlan(2, hashes.weight_hash(modules[2]), (window, *[EXACT] * 4))
    plan = replace(result.plan, layers=(layer,), units=(), tensors="")
    attach.load_plan(watched, plan, unverified=True)
    tokens = torch.randint(5, 500, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), adaattn_hf.monitoring(watched) as monitor:
        watched(tokens)
    counted = {entry["layer"]: entry for entry in adaattn_hf.statistics(watched)}[2]
    positions = torch.arange(200)
    far = (positions[:, None] - positions).abs() >= 32
    assert counted["fewer_keys"] == int((far & (positions >= 16)).any(-1).sum())
    assert counted["pairs"] == 5 * 200
    assert monitor.layers[2].rows == 1
    assert monitor.layers[2].lost[0] > 0
    longer = torch.randint(5, 500, (1, LENGTH + 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), adaattn_hf.monitoring(watched):
        watched(longer)
    assert {entry["layer"]: entry for entry in adaattn_hf.statistics(watched)}[2]["fewer_keys"] == 0


def test_layers_without_a_number_are_numbered_in_the_order_of_their_model(
    text: list[Path], encode: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = tf.DistilBertConfig(
        vocab_size=4096, dim=64, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=LENGTH,
        initializer_range=0.1,
    )  # fmt: skip
    config._attn_implementation = "adaattn"
    small = tf.DistilBertForMaskedLM(config).eval()
    settings = replace(SETTINGS, families=("bf16",), held_out=2, budget=0.5)
    found = calibrate(small, encode, text, settings, scoring=MaskedTokens(4, (2,), (3,), count=1), prices=prices())
    assert found.met, found.sentence
    # one layer exact: it must be known too
    first = replace(found.plan.layers[0], choices=(EXACT, EXACT))
    window = replace(found.plan.layers[1], choices=(make_choice("window", 16, 4),) * 2)
    plan = replace(found.plan, layers=(first, window))
    save_plan(small, replace(found, plan=plan), tmp_path)  # type: ignore[type-var]
    small.save_pretrained(tmp_path)
    tokens = torch.randint(5, 500, (1, 100), generator=torch.Generator().manual_seed(0))
    reloaded = load(tf.DistilBertModel, tmp_path)
    with torch.no_grad():
        planned = small.distilbert(tokens).last_hidden_state
        torch.testing.assert_close(reloaded(tokens).last_hidden_state, planned)
        adaattn_hf.remove_plan(reloaded)
        assert float((reloaded(tokens).last_hidden_state - planned).abs().max()) > 1e-4
    tuned = load(tf.DistilBertModel, tmp_path)
    with torch.no_grad():
        tuned.transformer.layer[0].attention.q_lin.weight.mul_(1.01)
        with pytest.raises(PlanError, match="weights of the model are not those"):
            tuned(tokens)


def test_scorings_that_mask_all_or_nothing_are_refused(scoring: MaskedTokens) -> None:
    with pytest.raises(ValueError, match="mask_share is 1"):
        replace(scoring, share=1.0)
    with pytest.raises(ValueError, match="maskings is 0"):
        replace(scoring, count=0)


def test_a_table_without_the_prices_asked_for_is_refused(
    model: Any, encode: Any, text: list[Path], scoring: MaskedTokens
) -> None:
    few = replace(SETTINGS, families=("int8",), sequences=1)
    with pytest.raises(ValueError, match="no prefill price of int8, expected one of every choice"):
        measure(open_inputs(model, encode, text, few, scoring=scoring), prices=prices())
    gpt2 = tf.AutoModelForCausalLM.from_pretrained(demo_model_path("gpt2"), attn_implementation="adaattn")
    with pytest.raises(ValueError, match="no decode price of exact, bf16"):
        measure(open_inputs(gpt2, encode, text, replace(few, families=("bf16",))), prices=prices())


def test_positions_of_tables_that_count_from_behind_padding_or_an_offset() -> None:
    small: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = tf.RobertaConfig(**small, intermediate_size=32, max_position_embeddings=66)
    opt = tf.OPTConfig(**small, ffn_dim=32, max_position_embeddings=64, word_embed_proj_dim=32)
    assert trained_positions(config) == 64
    for model in (tf.RobertaForMaskedLM(config).eval(), tf.OPTForCausalLM(opt).eval()):
        assert learned_positions(model) == 64
        with torch.no_grad():
            model(torch.full((1, 64), 5))
            with pytest.raises((IndexError, RuntimeError)):
                model(torch.full((1, 65), 5))


@pytest.mark.usefixtures("few_rounds")
def test_the_command_makes_shows_and_stores_a_plan(
    tmp_path: Path, text: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "BRIEF_SECONDS", 0.0)  # 512 tokens are foretold by 128 and 256
    directory = Path(shutil.copytree(demo_model_path("bert"), tmp_path / "bert"))
    table = tmp_path / "prices.json"
    table.write_text(prices().to_json())
    small = "--sequences 1 --rows 16 --labels 1 --joint 1 --held-out 3"
    words = ("calibrate", directory, "--in-place", "--data", text[0], "--families", "bf16", "--prices", table)
    more = ("--budget", "1%", "--lengths", LENGTH, "--maskings", 2, "--mask-share", 0.2)
    adaattn(*words, *small.split(), *more, says="perplexity +")
    adaattn(
        "plan", "show", directory, "--verbose",
        says=("scored on tokens at masked positions", "retrieval: does not apply"),
    )  # fmt: skip
    plan = adaattn_hf.plan_of(adaattn_hf.load_plan(load(tf.AutoModelForMaskedLM, directory)))
    assert (plan.protocol["scoring"]["maskings"], plan.protocol["scoring"]["mask_share"]) == (2, 0.2)
    # without lengths: the model's positions, for which this table has no prices
    says = "measured at 256 to 256 tokens, expected prices around 512"
    adaattn(*words, *small.split(), code=2, says=says)
    assert not list(directory.glob("*.partial*")), "refused before anything is measured"
    measured = prices()
    row = measured.prices["prefill"][LENGTH]
    table.write_text(replace(measured, prices={"prefill": {LENGTH: row, 512: row}}).to_json())
    adaattn(*words, *small.split(), "--maskings", 1, code=(0, 4))
    assert json.loads((directory / "adaattn_plan.json").read_text())["lengths"] == [512]


def test_the_command_refuses_an_encoder_without_its_head(tmp_path: Path, text: list[Path]) -> None:
    tf.BertModel.from_pretrained(demo_model_path("bert")).save_pretrained(tmp_path / "bare")
    tf.AutoTokenizer.from_pretrained(demo_model_path("bert")).save_pretrained(tmp_path / "bare")
    says = ("saved as BertModel without", "cls.predictions", "…ForMaskedLM", "load_plan(model, directory)")
    adaattn("calibrate", tmp_path / "bare", "--in-place", "--data", text[0], code=2, says=says)
