"""What the `evaluate` metric computes, and where the metric lies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adaattn_hf.patches import checkpoint

from . import corpora, runner
from .settings import Settings


def metric_path() -> str:
    """Directory to give to `evaluate.load`: `evaluate.load(metric_path())` works without a network."""
    return str(Path(__file__).parent / "metric" / "adaattn_perplexity")


def compute(
    predictions: Sequence[str],
    model_id: str,
    *,
    dtype: str = "float32",
    device: str | None = None,
    tokenizer: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Perplexity of texts, each a document, under `attn_implementation` beside `baseline`.

    `settings` are fields of `Settings` (attn_implementation, baseline, context, stride, batch_size, windows, …).
    """
    loaded = checkpoint.load(model_id, dtype=dtype, device=device, tokenizer=tokenizer)
    corpus = corpora.text_corpus(predictions, "predictions", "predictions")
    result = runner.measure(loaded, corpus, Settings(**settings))
    nll, documents = result.scores.nll[1], result.document
    perplexities = [float(np.exp(nll[documents == d].mean())) for d in np.unique(documents)]
    arm = result.report["quality"]["arms"][1]
    tested = result.report["quality"]["comparisons"][0]
    return {
        "perplexities": perplexities, "mean_perplexity": float(np.mean(perplexities)),
        "perplexity": arm["perplexity"], "nll": arm["nll_per_token"], "tokens": arm["tokens"],
        "delta_nll": tested["delta_nll"]["mean"], "upper": tested["delta_nll"]["upper"], "kl_mean": tested["kl_mean"],
    }  # fmt: skip
