"""Jobs of the first page beside prompts and steps: requests that are served together, and packed training."""

from __future__ import annotations

import contextlib
import copy
import time
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

import adaattn_hf

from .jobs import BIG, QWEN15, STOCK, Arm, Job, language, shaped, way

ON_CUDA = torch.cuda.is_available()
NEW, PAGE, PROMPT = (17, 256, 2048) if ON_CUDA else (4, 32, 16)
TRAINED = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 32768,
}  # fmt: skip
TINY = TRAINED | {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Served:
    """A standing engine with the requests of a cell; a call returns the seconds of a step behind the last prompt."""

    def __init__(self, model: Any, implementation: str, requests: int, prompt: int = PROMPT) -> None:
        """The engine starts with the first call; `prompt` is the number of tokens of each."""
        self.model, self.implementation, self.requests, self.prompt = model, implementation, requests, prompt
        self.block = contextlib.ExitStack()
        self.manager: Any = None

    def start(self) -> Any:
        """The engine: stock's by its defaults (graphs and tables of pages with flash-attn), ours as our block asks."""
        # some versions put flash-attn in the place of a bare "sdpa" where it is installed
        paged = self.implementation == "sdpa" and "paged|sdpa" in AttentionInterface._global_mapping
        self.model.set_attn_implementation("paged|sdpa" if paged else self.implementation)
        blocks = -(-(self.prompt + NEW) // PAGE) + 1
        asked: dict[str, Any] = {
            # the engine reads no further prompt where less than a fifth of its blocks is free
            "num_blocks": self.requests * blocks * 3 // 2, "max_batch_tokens": 8192 if ON_CUDA else 64,
            "page_size": PAGE, "block_size": PAGE, "max_requests_per_batch": self.requests,
            "max_blocks_per_request": blocks if ON_CUDA else 0,  # where an arm has tables of pages
            "allow_block_sharing": False, "auto_switch_to_flash": False,
        }  # fmt: skip
        engine = ContinuousBatchingConfig()
        if self.implementation == "adaattn":
            engine = self.block.enter_context(adaattn_hf.continuous_batching(self.model))
        for name in filter(partial(hasattr, engine), asked):
            setattr(engine, name, asked[name])
        settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = self.model.init_continuous_batching(generation_config=settings, continuous_batching_config=engine)
        manager.start()
        return manager

    def __call__(self) -> float:
        """Raises RuntimeError where the engine stops, answers with an error, or serves requests one after another."""
        self.manager = self.manager or self.start()
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, 64, (self.requests, self.prompt), generator=generator).tolist()
        self.manager.add_requests(prompts, max_new_tokens=NEW, record_timestamps=True)
        found: list[Any] = []
        until = time.perf_counter() + 120
        while len(found) < self.requests:
            one = self.manager.get_result(timeout=1)
            if one is None and (not self.manager.is_running() or time.perf_counter() > until):
                raise RuntimeError("the engine stopped")
            if one is not None and one.is_finished():
                found.append(one)
        errors = [one.error for one in found if one.error]
        if errors or any(len(one.timestamps) != NEW for one in found):
            raise RuntimeError(f"the engine: {errors[:1] or 'fewer tokens than asked for'}")
        read, end = max(one.timestamps[0] for one in found), max(one.timestamps[-1] for one in found)
        later = sum(at > read for one in found for at in one.timestamps)
        if 2 * later < (NEW - 1) * self.requests:
            raise RuntimeError(f"the engine served its requests in turn: {later} tokens came behind the last prompt")
        return float(end - read) / (NEW - 1)

    def stop(self) -> None:
        """Ends the engine."""
        if self.manager is not None:
            self.manager.stop(block=True)
        self.block.close()


def requests(device: torch.device, directory: str | None, count: int, prompt: int = PROMPT) -> Job:
    """A step of an engine that stands, for requests of one length that came together."""
    model = language(device, QWEN15, directory) if ON_CUDA else shaped(TINY, device, torch.float32)
    arms: dict[str, Arm | str] = {"eager": BIG, "flex_attention": "the engine has no such attention"}
    ending = contextlib.ExitStack()
    for name in (*(one for one in STOCK if one not in arms), "adaattn"):
        engine = Served(copy.deepcopy(model), name, count, prompt)
        arm = way(model, engine, name)
        arms[name] = arm if isinstance(arm, str) else Arm(engine, clocks=True)
        ending.callback(engine.stop)
    return Job(
        f"Qwen2.5-1.5B's shape, random weights, a step of {count} requests behind {prompt:,} tokens each",
        {"timed": "whole model", "dtype": "bfloat16", "prompt or step": "step, after the last prompt is read",
         "engine": "standing manager"},
        arms, after=ending.close,
    )  # fmt: skip


def training(device: torch.device, documents: int, length: int) -> Job:
    """A whole training step on documents packed into one row: forward, backward, optimizer."""
    model = shaped(TRAINED if ON_CUDA else TINY, device, torch.bfloat16 if ON_CUDA else torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ON_CUDA)
    ids = torch.randint(0, 64, (1, documents * length), device=device)
    places = torch.arange(length, device=device).repeat(documents)[None]

    def step() -> None:
        model(ids, position_ids=places, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    reasons = {"eager": BIG, "flex_attention": "its first step had not ended after 150 s"}
    arms: dict[str, Arm | str] = {name: reasons.get(name) or way(model, step, name) for name in STOCK}
    arms["adaattn"] = Arm(step, partial(model.set_attn_implementation, "adaattn"))
    return Job(
        f"LLaMA's layers, 0.4B, random weights, {documents} documents of {length:,} tokens packed into one row",
        {"timed": "whole model", "dtype": "bfloat16", "prompt or step": "training step: forward, backward, AdamW",
         "real tokens": 1.0},
        arms,
    )  # fmt: skip
