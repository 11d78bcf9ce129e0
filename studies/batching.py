"""Continuous batching: tokens a second of `generate_batch`, `python -m studies.batching [--prompts 2048,8192]`.

A model shaped like LLaMA-8B with random weights, eight requests at once, of as many tokens each. Stock attention runs
as the engine runs it by default, with CUDA graphs under flash-attn. Prints JSON lines: the arm, tokens of a prompt, new
tokens a second of the whole call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

import adaattn_hf
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.patches.registry import engine_name

from .cache_arms import shaped
from .cuda.measure import DEVICE, ON_CUDA, length
from .cuda.model import by, mapped, records

REQUESTS, NEW = 8, 128 if ON_CUDA else 4
SDPA = "paged|sdpa" if engine_name("sdpa").startswith("paged") else "sdpa"
KNOWN = {field.name for field in fields(ContinuousBatchingConfig)}
ENGINE: dict[str, Any] = {"allow_block_sharing": False, "auto_switch_to_flash": False}
ENGINE |= {} if ON_CUDA else {"num_blocks": 64, "max_batch_tokens": 64}


def seconds(model: Any, prompts: list[list[int]], engine: dict[str, Any]) -> float:
    """Of one call; the engine is made anew for each, as users have it."""
    engine = {key: value for key, value in {**ENGINE, **engine}.items() if key in KNOWN}
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    started = time.perf_counter()
    found = model.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(**engine),
        progress_bar=False,
    )
    errors = [one.error for one in found.values() if one.error]
    if errors or sum(len(one.generated_tokens) for one in found.values()) != NEW * len(prompts):
        raise RuntimeError(f"generate_batch: {errors[:1] or 'fewer tokens than asked for'}")
    return time.perf_counter() - started


def main(lengths: list[int]) -> None:
    """Every arm at every length: one call that warms, and the better of two."""
    model = shaped("8b" if ON_CUDA else "tiny", DEVICE)
    results = Path(__file__).parents[1] / "docs" / "results" / "budget.json"
    plans = {name: mapped(record, model)[0] for name, record in records(results).items()}
    ours = {"use_cuda_graph": False}
    arms: dict[str, tuple[str, Any, dict[str, Any]]] = {"adaattn": ("adaattn", None, ours)}
    arms |= {f"adaattn, plan {name}": ("adaattn", plan, ours) for name, plan in plans.items()}
    arms["sdpa"] = (SDPA, None, {})
    for version, there in ((2, is_flash_attn_2_available()), (3, is_flash_attn_3_available())):
        name = f"flash_attention_{version}"
        if ON_CUDA and there:
            arms |= {name: (name, None, {}), f"{name}, no graphs": (name, None, ours)}
    print(json.dumps(provenance(DEVICE)))
    for n in lengths:
        prompts = torch.randint(0, 64, (REQUESTS, n), generator=torch.Generator().manual_seed(n)).tolist()
        for name, (implementation, plan, engine) in arms.items():
            block = adaattn_hf.continuous_batching if plan or name == "adaattn" else contextlib.nullcontext
            with by(model, implementation, plan), block(model):
                took = min([seconds(model, prompts, engine) for _ in range(3)][1:])
            print(json.dumps({"arm": name, "prompt": n, "tokens/s": REQUESTS * NEW / took}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="2048,8192", help="tokens of each prompt, comma-separated")
    main([length(int(n)) for n in parser.parse_args().prompts.split(",")])
