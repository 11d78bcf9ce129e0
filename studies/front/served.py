"""Jobs of the first page beside prompts and steps: requests that are served together, and packed training."""

import contextlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig

import adaattn_hf

from .captured import SINKS, WINDOW, planned
from .jobs import BIG, QWEN15, STOCK, Arm, Job, language, named, shaped, twin, way

ON_CUDA = torch.cuda.is_available()
NEW, PAGE, PROMPT, STEP = (17, 256, 2000, 4096) if ON_CUDA else (4, 32, 48, 64)
PLAN = "adaattn, plan"
TRAINED = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 32768,
}  # fmt: skip
TINY = TRAINED | {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Served:
    """A standing engine with the requests of a cell; a call returns the seconds of a step behind their prompts.

    The engine keeps all whole pages of what it has read, so that requests read the rest in one step of at most `STEP`
    tokens, and then step together.
    """

    def __init__(self, model: Any, implementation: str, requests: int, prompt: int = PROMPT) -> None:
        """The engine starts with the first call; `prompt` is the number of tokens of each, no whole pages."""
        self.model, self.implementation, self.requests, self.prompt = model, implementation, requests, prompt
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(0, 64, (requests, prompt), generator=generator).tolist()
        self.block = contextlib.ExitStack()
        self.manager: Any = None

    def start(self) -> Any:
        """The engine: stock's by its defaults (graphs and tables of pages with flash-attn), ours as our block asks."""
        # some versions put flash-attn in the place of a bare "sdpa" where it is installed
        paged = self.implementation == "sdpa" and "paged|sdpa" in AttentionInterface._global_mapping
        self.model.set_attn_implementation("paged|sdpa" if paged else self.implementation)
        blocks = -(-(self.prompt + NEW) // PAGE) + 1
        asked: dict[str, Any] = {
            # room for what is asked, and no more: several engines stand at once
            "num_blocks": self.requests * blocks, "safety_margin": 0.0, "max_memory_percent": 1.0,
            "max_batch_tokens": STEP, "page_size": PAGE, "block_size": PAGE,
            "max_requests_per_batch": self.requests, "auto_switch_to_flash": False,
            "max_blocks_per_request": blocks if ON_CUDA else 0,  # where an arm has tables of pages
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

    def read(self) -> None:
        """Reads each prompt once, alone, by pieces of a step.

        Transformers 5.17 to 5.24 prepare a step before they note what the last one has read: of a prompt that several
        steps read, the pages of the last but one are not kept. Nor are those of a request's last token.
        """
        for prompt in self.prompts:
            for end in (*range(STEP, self.prompt, STEP), self.prompt):
                self.answers([prompt[:end]], 2)

    def answers(self, prompts: list[list[int]], new: int) -> list[Any]:
        """What the engine answers to all prompts; RuntimeError where it stops, or with fewer than `new` tokens."""
        self.manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True)
        found: list[Any] = []
        until = time.perf_counter() + 120
        while len(found) < len(prompts):
            one = self.manager.get_result(timeout=1)
            if one is None and (not self.manager.is_running() or time.perf_counter() > until):
                raise RuntimeError("the engine stopped")
            if one is not None and one.is_finished():
                found.append(one)
        errors = [one.error for one in found if one.error]
        if errors or any(len(one.timestamps) != new for one in found):
            raise RuntimeError(f"the engine: {errors[:1] or 'fewer tokens than asked for'}")
        return found

    def __call__(self) -> float:
        """Raises RuntimeError where the engine fails, or serves requests one after another."""
        if self.manager is None:
            self.manager = self.start()
            self.read()
            torch.cuda.empty_cache()
        found = self.answers(self.prompts, NEW)
        read, end = max(one.timestamps[0] for one in found), max(one.timestamps[-1] for one in found)
        later = sum(at > read for one in found for at in one.timestamps)
        if 4 * later < 3 * (NEW - 1) * self.requests:
            raise RuntimeError(f"the engine served its requests in turn: {later} tokens came behind the last prompt")
        return float(end - read) / (NEW - 1)

    def stop(self) -> None:
        """Ends the engine."""
        if self.manager is not None:
            self.manager.stop(block=True)
        self.block.close()


def requests(
    device: torch.device, directory: str | None, count: int, prompt: int = PROMPT,
    sizes: Mapping[str, Any] = QWEN15, absent: Mapping[str, str] | None = None,
) -> Job:  # fmt: skip
    """A step of an engine that stands, for requests of one length that came together.

    Where prompts are longer than the stated plan's window of `captured`, an arm runs by it.
    """
    model = language(device, sizes, directory) if ON_CUDA else shaped(TINY, device, torch.float32)
    arms: dict[str, Arm | str] = {"eager": BIG, "flex_attention": "the engine has no such attention", **(absent or {})}
    said: dict[str, Any] = {"timed": "whole model", "dtype": "bfloat16"}
    said |= {"prompt or step": "step, after the last prompt is read", "engine": "standing manager, prompts kept"}
    ending = contextlib.ExitStack()
    for name in (*(one for one in STOCK if one not in arms), "adaattn", *([PLAN] if prompt > 2 * WINDOW else [])):
        own = twin(model)
        if name == PLAN:
            own.set_attn_implementation("adaattn")
            own = planned(own, prompt + NEW)
            said["plan"] = f"stated, unverified: every second key/value head reads {WINDOW:,} keys and {SINKS} sinks"
        engine = Served(own, name.partition(",")[0], count, prompt)
        arm = way(model, engine, name)
        arms[name] = arm if isinstance(arm, str) else Arm(engine, clocks=True)
        ending.callback(engine.stop)
    title = f"{named(sizes, directory)}, a step of {count} requests behind {prompt:,} tokens each"
    return Job(title, said, arms, after=ending.close)


def training(device: torch.device, documents: int, length: int, packed: bool = True) -> Job:
    """A whole training step on documents packed into one row, or a row each: forward, backward, optimizer."""
    model = shaped(TRAINED if ON_CUDA else TINY, device, torch.bfloat16 if ON_CUDA else torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ON_CUDA)
    rows = 1 if packed else documents
    ids = torch.randint(0, 64, (rows, documents * length // rows), device=device)
    places = torch.arange(length, device=device).repeat(documents).view_as(ids)

    def step() -> None:
        model(ids, position_ids=places, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    reasons = {"eager": BIG, "flex_attention": "its first step had not ended after 150 s"}
    arms: dict[str, Arm | str] = {name: reasons.get(name) or way(model, step, name) for name in STOCK}
    arms["adaattn"] = Arm(step, partial(model.set_attn_implementation, "adaattn"))
    title = f"LLaMA's layers, 0.4B, random weights, {documents} documents of {length:,} tokens"
    title += " packed into one row" if packed else ""
    said = {"timed": "whole model", "dtype": "bfloat16", "real tokens": 1.0}
    return Job(title, said | {"prompt or step": "training step: forward, backward, AdamW"}, arms)
