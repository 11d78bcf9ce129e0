"""Perplexity of texts under a model, with an attention implementation and with the one that it replaces.

A metric for the package `evaluate`, loaded offline from this directory (`adaattn_hf.eval.metric_compute.metric_path`).
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

import adaattn_hf.eval.metric_compute

_DESCRIPTION = """Perplexity per token of texts under a causal or masked language model whose attention runs
on `attn_implementation`, and the same under `baseline`: the paired difference in nats per token says what the
replacement costs."""

_INPUTS = """
Args:
    predictions: texts, each a document of its own.
    model_id: hub id or directory of the model.
    attn_implementation: attention implementation under test (default "adaattn").
    baseline: stock implementation (default "sdpa").
    dtype, device, context, stride, batch_size, windows, tokenizer: as for `adaattn eval`.
Returns:
    perplexities: of each text under `attn_implementation`; mean_perplexity: their mean; perplexity: of all tokens
    together; nll: nats per token; delta_nll: nats per token more than under `baseline`, with upper, its one-sided 95 %
    bound over texts (None for one text); kl_mean: mean KL(baseline || attn_implementation) in nats; tokens: how
    many were scored.
"""

_CITATION = ""


class AdaAttnPerplexity(evaluate.Metric):  # type: ignore[misc]
    """The metric."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            module_type="metric",
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(self, predictions: list[str], model_id: str, **keywords: Any) -> dict[str, Any]:
        return adaattn_hf.eval.metric_compute.compute(predictions, model_id, **keywords)
