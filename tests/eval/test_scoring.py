"""Numbers per token against their definitions, and the independence of batches."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaattn_hf.errors import ModelUnavailable, UsageError
from adaattn_hf.eval import corpora, runner, tasks
from adaattn_hf.eval.objectives import special_tokens
from adaattn_hf.eval.perplexity import totals
from adaattn_hf.eval.settings import PADDINGS, Settings
from adaattn_hf.eval.windows import TokenWindow
from adaattn_hf.patches import checkpoint

from .conftest import OWN_PAGES, OWN_PASSAGES


def window_of(length: int, positions: list[int], targets: list[int]) -> TokenWindow:
    return TokenWindow(0, np.zeros(length, np.int64), np.array(positions), np.array(targets))


def test_scores_are_their_definitions() -> None:
    torch.manual_seed(3)
    logits = [torch.randn(2, 5, 7) * 3 for _ in range(2)]
    windows = [window_of(5, [0, 3], [6, 2]), window_of(5, [4], [1])]
    scores = runner.score(logits, windows, (0, 0))
    for token, (row, column, target) in enumerate([(0, 0, 6), (0, 3, 2), (1, 4, 1)]):
        p, q = ([math.exp(v) for v in arm[row, column].double().tolist()] for arm in logits)
        p, q = ([v / sum(r) for v in r] for r in (p, q))
        assert scores.nll[0, token] == pytest.approx(-math.log(p[target]), rel=1e-12)
        assert scores.nll[1, token] == pytest.approx(-math.log(q[target]), rel=1e-12)
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert scores.kl[0, token] == pytest.approx(kl, rel=1e-10)
        assert scores.hit[1, token] == (q.index(max(q)) == target)
        assert scores.agree[0, token] == (q.index(max(q)) == p.index(max(p)))


def test_more_rows_than_are_taken_at_a_time() -> None:
    logits = torch.randn(1, 200, 11)
    windows = [window_of(200, list(range(200)), [i % 11 for i in range(200)])]
    whole = runner.score([logits, logits], windows, (0,))
    alone = [runner.score([logits], [window_of(200, [i], [i % 11])], (0,)).nll[0, 0] for i in range(200)]
    assert whole.nll.shape == (2, 200)
    assert whole.nll[0].tolist() == alone
    assert not whole.kl.any()


def test_impossible_tokens_make_no_nan() -> None:
    first = torch.tensor([[[0.0, -math.inf, 1.0]]])
    second = torch.tensor([[[0.5, -math.inf, 1.0]]])
    scores = runner.score([first, second], [window_of(1, [0], [0])], (0,))
    assert np.isfinite(scores.kl).all()
    assert scores.kl[0, 0] > 0


@given(st.lists(st.integers(1, 6), max_size=60), st.integers(1, 9), st.sampled_from(PADDINGS))
def test_every_window_is_in_one_batch(lengths: list[int], batch_size: int, padding: str) -> None:
    windows = [window_of(n, [n - 1], [0]) for n in lengths]
    batches = runner.plan_batches(windows, batch_size, padding)
    assert sorted(i for batch in batches for i in batch) == list(range(len(windows)))
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    if padding == "none":
        assert all(len({lengths[i] for i in batch}) == 1 for batch in batches)


read = functools.cache(functools.partial(checkpoint.load, dtype="float32", device="cpu"))


def measured(directory: Path, corpus: corpora.Corpus, **settings: object) -> runner.Measured:
    return runner.measure(read(directory), corpus, Settings(**{"attn_implementation": "eager", **settings}))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("corpus", [OWN_PAGES, OWN_PASSAGES], ids=["pages", "lastword"])
def test_perplexity_does_not_depend_on_the_batch_size(
    request: pytest.FixtureRequest, kind: str, corpus: corpora.Corpus
) -> None:
    directory = request.getfixturevalue(kind)
    share = 0.2 if kind == "bert" else 1.0
    alone = measured(directory, corpus, batch_size=1, mask_fraction=share).scores
    batched = measured(directory, corpus, batch_size=5, mask_fraction=share).scores
    np.testing.assert_allclose(batched.nll, alone.nll, rtol=0, atol=2e-5)
    assert batched.nll.sum() == pytest.approx(alone.nll.sum(), rel=1e-7)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("impl", ["eager", "adaattn"])
def test_padding_changes_no_number(request: pytest.FixtureRequest, kind: str, impl: str) -> None:
    directory = request.getfixturevalue(kind)
    alone = measured(directory, OWN_PASSAGES, attn_implementation=impl).scores
    for padding in ("right", "left"):
        padded = measured(directory, OWN_PASSAGES, attn_implementation=impl, batch_size=4, padding=padding).scores
        np.testing.assert_allclose(padded.nll, alone.nll, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "adaattn"])
def test_an_arm_against_itself_differs_by_exactly_nothing(
    request: pytest.FixtureRequest, kind: str, implementation: str
) -> None:
    settings = {
        "attn_implementation": implementation, "baseline": implementation, "batch_size": 3,
        "mask_fraction": 0.1,
    }  # fmt: skip
    result = measured(request.getfixturevalue(kind), OWN_PAGES, **settings)
    compared = result.report["quality"]["comparisons"][0]
    assert compared["delta_nll"]["mean"] == 0.0
    assert (compared["delta_nll"]["low"], compared["delta_nll"]["upper"]) == (0.0, 0.0)
    assert compared["perplexity_ratio"]["value"] == 1.0
    assert (compared["kl_mean"], compared["kl_max"], compared["top1_agreement"]) == (0.0, 0.0, 1.0)


def test_a_worse_arm_shows(loaded: checkpoint.Checkpoint) -> None:
    """The meta-test of the one above: with one weight changed in one arm, every figure moves."""
    models = [checkpoint.with_attention(loaded, "sdpa") for _ in range(2)]
    models[1].model.layers[0].self_attn.v_proj = torch.nn.Linear(32, 16, bias=False)
    windows = [TokenWindow(0, np.arange(5, 25), np.arange(20), np.arange(6, 26))]
    keywords, offsets = runner.collate(windows, torch.device("cpu"))
    scores = runner.score([runner.forward(m, keywords) for m in models], windows, offsets)
    assert (scores.nll[0] != scores.nll[1]).all()
    assert scores.kl.min() > 0
    assert not scores.agree.all()


@pytest.mark.parametrize("stride", [5, 16])
def test_strided_windows_are_the_loop_of_transformers(llama: Path, stride: int) -> None:
    """Its documentation's page on perplexity, written out: the loss of each window times what it scores."""
    context, loaded = 16, checkpoint.load(llama, dtype="float32", device="cpu")
    corpus = corpora.text_corpus(["the lamp and the keeper of the light " * 5], "here", "x")
    task = tasks.build(loaded, corpus, Settings(windows="strided", context=context, stride=stride))
    ids = torch.tensor([loaded.tokenizer.encode(corpus.documents[0].text)])
    loaded.model.set_attn_implementation("eager")
    total, count, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + context, ids.shape[1])
        read = ids[:, begin:end]
        labels = read.clone()
        labels[:, : -(end - before)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            with torch.no_grad():
                total += float(loaded.model(read, labels=labels).loss) * scored
        count, before = count + scored, end
        if end == ids.shape[1]:
            break
    assert sum(len(window.targets) for window in task.windows) == count > 40
    found = measured(llama, corpus, windows="strided", context=context, stride=stride).scores.nll
    assert found.shape[1] == count
    for arm in found:
        assert arm.sum() == pytest.approx(total, rel=1e-6)


def test_totals_are_their_definitions() -> None:
    found = totals(30.0, 10, words=8, size=40)
    assert found["perplexity"] == pytest.approx(math.exp(3))
    assert found["word_perplexity"] == pytest.approx(math.exp(30 / 8))
    assert found["byte_perplexity"] == pytest.approx(math.exp(0.75))
    assert found["bits_per_byte"] == pytest.approx(0.75 / math.log(2))
    cut = totals(30.0, 10)
    assert {cut[name] for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")} == {None}
    assert totals(1e6, 1)["perplexity"] == math.inf


def test_special_tokens_count_as_a_documents(bert: Path) -> None:
    loaded = checkpoint.load(bert, device="cpu")
    assert special_tokens(loaded.tokenizer) == ([2], [3])
    corpus = corpora.text_corpus(["the lamp and the keeper"], "here", "x")
    causal = checkpoint.Checkpoint("x", loaded.model, loaded.tokenizer, "causal")
    task = tasks.build(causal, corpus, Settings(windows="strided"))
    assert task.windows[0].input_ids[0] == 2
    assert "the tokenizer adds [2] before and [3] after each document" in task.protocol


def test_the_token_budget_ends_between_documents(loaded: checkpoint.Checkpoint) -> None:
    corpus = corpora.text_corpus(["lamp"] * 3, "here", "x")
    each = len(loaded.tokenizer.encode("lamp"))
    task = tasks.build(loaded, corpus, Settings(limit_tokens=2 * each))
    assert {w.document for w in task.windows} == {0, 1}
    assert task.words == 2  # nothing was cut


def test_a_masked_model_needs_a_mask_token(llama: Path, bert: Path) -> None:
    tokenizer = checkpoint.load(llama, device="cpu").tokenizer
    loaded = checkpoint.load(bert, device="cpu")
    mixed = checkpoint.Checkpoint("x", loaded.model, tokenizer, "masked")
    with pytest.raises(ModelUnavailable, match="no mask token"):
        tasks.build(mixed, OWN_PAGES, Settings())


def test_a_text_without_tokens_is_refused(loaded: checkpoint.Checkpoint) -> None:
    corpus = corpora.text_corpus(["x"], "here", "x")
    with pytest.raises(UsageError, match="no token to score"):
        tasks.build(loaded, corpus, Settings(windows="strided"))
