"""Stock figures of real models on real text that were known before this harness was."""

from pathlib import Path

import pytest

from adaattn_hf.eval import corpora, runner
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches import checkpoint

pytestmark = pytest.mark.assets


@pytest.mark.parametrize(
    ("model", "tokens", "perplexity"), [("stories15M-hf", 942, 3.115), ("stories260K-hf", 1804, 3.548)]
)
def test_tiny_stories(assets: Path, model: str, tokens: int, perplexity: float) -> None:
    """Each story stripped, BOS by the tokenizer, every token after it scored."""
    loaded = checkpoint.load(assets / "models" / model, device="cpu")
    stories = (assets / "data" / "tinystories_sample.txt").read_text(encoding="utf-8").split("<|endoftext|>")
    corpus = corpora.text_corpus(map(str.strip, stories), "tinystories_sample.txt", "tinystories")
    arms = runner.evaluate(loaded, corpus, Settings(windows="strided"))["quality"]["arms"]
    assert [arm["tokens"] for arm in arms] == [tokens, tokens]
    assert [round(arm["perplexity"], 3) for arm in arms] == [perplexity, perplexity]
