"""A plan named in lm-evaluation-harness's `--model_args` runs there, and loses what our own harness says."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaattn_hf.eval import corpora, lm_eval_model
from adaattn_hf.patches import checkpoint

from .conftest import PAGES
from .test_lm_eval_agreement import ours, their_task, theirs
from .test_planned import kept

pytestmark = pytest.mark.filterwarnings("default")


def test_a_plan_is_handed_over_by_model_args(llama: Path, tmp_path: Path) -> None:
    manager = their_task("wikitext", "page", PAGES, tmp_path)
    plan = kept(checkpoint.load(llama, device="cpu"), tmp_path / "narrow", 2)
    corpus = corpora.wikitext_corpus(PAGES, "own pages")

    def perplexity(plan: str) -> float:
        arguments = f"pretrained={llama},dtype=float32,plan={plan}"
        found = theirs(lm_eval_model.NAME, "wikitext", manager, model_args=arguments, device="cpu", batch_size=1)
        return found["word_perplexity"]

    exact, planned = perplexity("none"), perplexity(plan)
    assert exact == pytest.approx(ours(llama, corpus)["word_perplexity"], rel=1e-6)
    assert planned == pytest.approx(
        ours(llama, corpus, attn_implementation="adaattn", plan=plan)["word_perplexity"], rel=1e-5
    )
    assert abs(planned / exact - 1) > 1e-4
