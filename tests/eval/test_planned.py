"""A model that carries a plan: the harness sees the loss, and counts where the plan did anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from adaattn_hf import attach
from adaattn_hf.eval import activation, checkpoint, corpora, runner
from adaattn_hf.eval.settings import Settings
from adaattn_hf.plan import EXACT, PLAN_FORMAT, Choice, LayerPlan, Plan, Verified

from .conftest import PAGES

WINDOW = 8


@pytest.fixture
def planned(llama: Path) -> checkpoint.Checkpoint:
    """The tiny LLaMA with a window of 8 keys in one of two key/value heads of one of two layers."""
    loaded = checkpoint.load(llama, device="cpu")
    module = dict(attach.attention_modules(loaded.model, "llama"))[1]
    layer = LayerPlan(1, attach.weight_hash(module), (Choice("window", WINDOW), EXACT))
    verified = Verified(
        True, 1e-4, 5e-4, 0.98, 1, 12, 4000, 2e-4, 1e-2, 0.995, 0.5, 0.5, 1.0, 0.4, 2e-4, "passed"
    )
    plan = Plan(
        PLAN_FORMAT, "llama", "ab" * 32, "float32", "0.1.0", "2.13.0", transformers.__version__, 1e-3, 0, "cd" * 32,
        {}, (64, 128), (layer,), (), verified, "",
    )  # fmt: skip
    attach.attach(loaded.model, plan)
    return loaded


def test_the_rate_is_counted_and_the_loss_is_seen(planned: checkpoint.Checkpoint) -> None:
    corpus = corpora.wikitext_corpus(PAGES, "own pages")
    report = runner.evaluate(planned, corpus, Settings(batch_size=2))
    lengths = [len(w.input_ids) for w in runner.measure(planned, corpus, Settings(batch_size=2)).task.windows]
    changed = sum(max(n - WINDOW, 0) for n in lengths)  # a quarter of all heads sees fewer keys there
    assert report["activation"][1]["rate"] == pytest.approx(changed / sum(lengths) / 4)
    assert report["quality"]["comparisons"][0]["kl_mean"] > 1e-6


def test_short_text_never_leaves_the_exact_path_and_the_rate_says_so(planned: checkpoint.Checkpoint) -> None:
    corpus = corpora.wikitext_corpus(PAGES, "own pages")
    report = runner.evaluate(planned, corpus, Settings(context=WINDOW))
    assert report["activation"][1]["rate"] == 0.0
    assert report["activation"][1]["pairs"] > 0
    assert report["quality"]["comparisons"][0]["kl_mean"] < 1e-9


def test_stock_does_not_heed_the_plan(planned: checkpoint.Checkpoint) -> None:
    assert activation.has_plan(planned.model, "adaattn")
    assert not activation.has_plan(planned.model, "sdpa")
