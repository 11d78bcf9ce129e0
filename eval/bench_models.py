"""Speed of whole models: batches without their padding, and decoding with a cache that grows in place.

Each scenario is a function that builds one workload and returns the same work done several ways. `measure` runs the
ways in turn, round after round, so that what else the machine does falls on all of them alike.

    python eval/bench_models.py docs/results/unpad_and_cache [--only NAME …] [--threads 2] [--rounds 5]

writes `.json` and the `.md` that is made from it. Runs of some scenarios keep the others' figures.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

import adaattn_hf
from adaattn_hf.eval.provenance import provenance

__all__ = [
    "SCENARIOS",
    "Scenario",
    "bert_batch",
    "causal_training",
    "decode_step",
    "left_padded_prompt",
    "measure",
]

# 12 to 512 tokens, 26 % of the padded batch.
LENGTHS = (512, 210, 120, 80, 60, 40, 31, 12)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = "adaattn prepared"


@dataclass(frozen=True)
class Scenario:
    """The same work done several ways.

    Attributes:
        says: What the work is.
        ways: Name to a call that does it once.
        error: Largest difference between `OURS` and stock `sdpa` on real tokens, relative to the largest value.
    """

    says: str
    ways: Mapping[str, Callable[[], object]]
    error: float


def _ragged(vocabulary: int, lengths: tuple[int, ...] = LENGTHS, *, left: bool = False) -> dict[str, Tensor]:
    longest = max(lengths)
    places = torch.arange(longest)
    mask = torch.stack([(places >= longest - n) if left else (places < n) for n in lengths]).long()
    ids = torch.randint(1, vocabulary, mask.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * mask, "attention_mask": mask}


def _models(
    cls: Any, config: Any, dtype: torch.dtype, implementations: tuple[str, ...]
) -> dict[str, tf.PreTrainedModel]:
    """The same random weights under each implementation; ours prepared and unprepared."""
    torch.manual_seed(0)
    first = cls._from_config(copy.deepcopy(config), attn_implementation="sdpa", dtype=dtype).eval()
    found = {"sdpa": first}
    for name in implementations:
        if name != "sdpa":
            implementation = "adaattn" if name == OURS else name
            own = copy.deepcopy(config)  # the implementation is written into it
            model = cls._from_config(own, attn_implementation=implementation, dtype=dtype).eval()
            # one set of weights in memory for all ways
            model.load_state_dict(first.state_dict(), assign=True)
            model.tie_weights()
            found[name] = adaattn_hf.prepare(model) if name == OURS else model
    return found


def _difference(models: Mapping[str, Any], inputs: Mapping[str, Tensor], real: Tensor) -> float:
    with torch.no_grad():
        stock, ours = (models[name](**inputs)[0][real].float() for name in ("sdpa", OURS))
    return float((stock - ours).abs().max() / stock.abs().max())


def _calls(models: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> dict[str, Callable[[], object]]:
    def once(model: Any) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return model(**inputs)

        return call

    return {name: once(model) for name, model in models.items()}


def bert_batch(dtype: str = "fp32") -> Scenario:
    """BERT-base on a batch with a real mix of lengths, forward."""
    config = tf.BertConfig()
    models = _models(tf.BertModel, config, DTYPES[dtype], ("eager", "adaattn", OURS))
    inputs = _ragged(config.vocab_size)
    real = inputs["attention_mask"].bool()
    share = 100 * real.float().mean()
    return Scenario(
        f"BERT-base, {dtype}, forward, {len(LENGTHS)} texts of 12 to 512 tokens ({share:.0f} % real)",
        _calls(models, inputs),
        _difference(models, inputs, real),
    )


def left_padded_prompt(dtype: str = "fp32") -> Scenario:
    """A LLaMA-1B-shaped model of two layers reads left-padded prompts into its cache."""
    config = _llama(2048, 32, 8, 8192, vocabulary=32000)
    models = _models(tf.LlamaForCausalLM, config, DTYPES[dtype], ("adaattn", OURS))
    inputs = _ragged(32000, left=True)
    real = inputs["attention_mask"].bool()
    share = 100 * real.float().mean()
    keep: dict[str, Any] = {**inputs, "logits_to_keep": 1}
    return Scenario(
        f"LLaMA-1B shape, 2 layers, {dtype}, prompts of 12 to 512 tokens padded on the left ({share:.0f} % real) into "
        "the cache, last logits",
        _calls(models, keep),
        _difference(models, keep, torch.ones(len(LENGTHS), 1, dtype=torch.bool)),
    )


def causal_training(dtype: str = "fp32") -> Scenario:
    """GPT-2-shaped model of four layers, forward and backward on a padded batch with labels."""
    config = tf.GPT2Config(n_layer=4, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    models = _models(tf.GPT2LMHeadModel, config, DTYPES[dtype], ("adaattn", OURS))
    lengths = tuple(n // 2 for n in LENGTHS)
    inputs = _ragged(config.vocab_size, lengths)
    real = inputs["attention_mask"].bool()
    labels = inputs["input_ids"].masked_fill(~real, -100)

    def once(model: Any) -> Callable[[], object]:
        def call() -> object:
            loss = model(**inputs, labels=labels, use_cache=False).loss
            loss.backward()
            model.zero_grad()
            return loss

        return call

    share = 100 * real.float().mean()
    return Scenario(
        f"GPT-2-small shape, 4 layers, {dtype}, one training step without the optimiser, {len(LENGTHS)} texts of 6 to "
        f"256 tokens ({share:.0f} % real)",
        {name: once(model) for name, model in models.items()},
        _difference(models, {**inputs, "use_cache": False}, real),  # type: ignore[dict-item]
    )


def _llama(
    hidden: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, layers: int = 2
) -> tf.LlamaConfig:
    return tf.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )


def decode_step(
    dtype: str = "fp32",
    batch: int = 8,
    past: int = 4096,
    heads: int = 16,
    kv_heads: int = 16,
    head_dim: int = 64,
    mlp: int = 64,
    layers: int = 1,
) -> Scenario:
    """One token for each row of a batch behind a long past; with the default `mlp` attention and cache are the work.

    The past stays as long as it is: what a step appends is taken back, which costs neither cache anything. The way
    `sdpa, growing cache` says which part of the gain is the cache's.
    """
    config = _llama(heads * head_dim, heads, kv_heads, mlp, vocabulary=256, layers=layers)
    models = _models(tf.LlamaForCausalLM, config, DTYPES[dtype], (OURS,))
    ids = torch.randint(1, 256, (batch, 1), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    pasts = [
        [
            torch.randn((batch, kv_heads, past, head_dim), generator=generator).to(DTYPES[dtype])
            for _ in range(2)
        ]
        for _ in range(layers)
    ]

    def once(model: Any, cache: tf.DynamicCache) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with torch.no_grad():
                logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
                cache.crop(-1)
            return logits

        with torch.no_grad():
            for layer, (keys, values) in enumerate(pasts):
                cache.update(keys, values, layer)
        return call

    ways = {
        "sdpa": once(models["sdpa"], tf.DynamicCache(config=config)),
        "sdpa, growing cache": once(models["sdpa"], adaattn_hf.GrowingCache(config=config)),
        OURS: once(models[OURS], adaattn_hf.GrowingCache(config=config)),
    }
    stock, ours = ways["sdpa"]().float(), ways[OURS]().float()
    kind = f"{heads}/{kv_heads} heads of {head_dim}"
    return Scenario(
        f"LLaMA, {layers} layer, MLP of {mlp}, {kind}, {dtype}, one decode step, batch {batch} behind {past} tokens",
        ways,
        float((stock - ours).abs().max() / stock.abs().max()),
    )


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "bert-fp32": lambda: bert_batch("fp32"),
    "bert-bf16": lambda: bert_batch("bf16"),
    "prompt-fp32": lambda: left_padded_prompt("fp32"),
    "training-fp32": lambda: causal_training("fp32"),
    "decode-mha-fp32": lambda: decode_step("fp32"),
    "decode-mha-bf16": lambda: decode_step("bf16"),
    "decode-gqa-bf16": lambda: decode_step("bf16", heads=32, kv_heads=8, head_dim=128),
    "decode-llama-1b-bf16": lambda: decode_step("bf16", heads=32, kv_heads=8, mlp=8192, layers=2),
}


def measure(scenario: Scenario, rounds: int) -> dict[str, Any]:
    """Seconds of each way and ratios to stock `sdpa`: medians over rounds, with the smallest and the largest."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in scenario.ways}
    for call in scenario.ways.values():
        call()
    for _ in range(rounds):
        for name, call in scenario.ways.items():
            gc.collect()
            wall, process = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - wall, time.process_time() - process))
    found: dict[str, Any] = {"says": scenario.says, "error": scenario.error, "rounds": rounds, "ways": {}}
    for name, pairs in times.items():
        ratios = [stock[1] / own[1] for stock, own in zip(times["sdpa"], pairs, strict=True)]
        walls = [stock[0] / own[0] for stock, own in zip(times["sdpa"], pairs, strict=True)]
        found["ways"][name] = {
            "wall_seconds": statistics.median(p[0] for p in pairs),
            "process_seconds": statistics.median(p[1] for p in pairs),
            "ratio_process": [statistics.median(ratios), min(ratios), max(ratios)],
            "ratio_wall": [statistics.median(walls), min(walls), max(walls)],
        }
    return found


def table(report: Mapping[str, Any]) -> str:
    """Markdown of a report."""
    where = report["provenance"]
    versions = where["versions"]
    lines = [
        "# Whole models: padding taken out, caches that grow in place",
        "",
        f"{where['cpu']}, {where['threads']} threads, torch {versions['torch']}, transformers "
        f"{versions['transformers']}. Ratios are to stock `sdpa` in the same process, round by round: median "
        "(smallest to largest). Process time counts all threads. Random weights. Made by `eval/bench_models.py`.",
    ]
    for name, one in report["scenarios"].items():
        lines += [
            "",
            f"## {name}",
            "",
            f"{one['says']}. Largest difference to stock, relative: {one['error']:.1e}. {one['rounds']} rounds.",
            "",
            "| way | process s | wall s | ratio of process time | ratio of wall time |",
            "|---|---:|---:|---:|---:|",
        ]
        for way, own in one["ways"].items():
            process, wall = (
                f"{m:.2f} ({low:.2f} to {high:.2f})"
                for m, low, high in (own["ratio_process"], own["ratio_wall"])
            )
            lines.append(
                f"| {way} | {own['process_seconds']:.4f} | {own['wall_seconds']:.4f} | {process} | {wall} |"
            )
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="*", choices=tuple(SCENARIOS), default=tuple(SCENARIOS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.output.with_suffix(".json")
    known = json.loads(path.read_text(encoding="utf-8"))["scenarios"] if path.exists() else {}
    for name in options.only:
        known[name] = measure(SCENARIOS[name](), options.rounds)
        report = {
            "provenance": provenance(torch.device("cpu")),
            "scenarios": {k: known[k] for k in SCENARIOS if k in known},
        }
        _write(path, json.dumps(report, indent=1) + "\n")
        _write(path.with_suffix(".md"), table(report))
        print(name, {way: round(own["ratio_process"][0], 2) for way, own in known[name]["ways"].items()})
        gc.collect()


if __name__ == "__main__":
    main()
