"""A model shaped like LLaMA-8B, 32 layers with random weights: prefill and decode, stock, exact and under plans.

The plans have the densities of SmolLM2-135M's verified ones. The rule: of the windows-only plans of `budget.json`
(family `sparsity`) the one of the largest budget whose upper bounds on held-out text hold 0.1 % (1 %) at every length;
layer `i`
of 32 takes the windows of layer `floor(i * 30 / 32)`, key/value head `h` of 8 those of head `floor(h * 3 / 8)`, of as
many keys as there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adaattn_hf import remove_plan
from adaattn_hf.attention.heads import ALL
from adaattn_hf.patches.plans import attach, hashes, parts
from adaattn_hf.patches.plans.configured import computes_by
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.plans.choices import EXACT, Choice, Window
from adaattn_hf.plans.plan import PLAN_FORMAT, LayerPlan, Plan

from ..budget.pairs import window_of
from ..cache_arms import ARMS, shaped
from ..cache_speed import filled
from .kernels import seen_share
from .measure import DEVICE, ON_CUDA, Cell, Section, length

BUDGETS = {"0.1 %": math.log1p(0.001), "1 %": math.log1p(0.01)}
LAYERS, HEADS = 30, 3
"""Of SmolLM2-135M: its layers and key/value heads."""
LONGEST = (1 << 17) + 256


def records(budget_json: Path) -> dict[str, dict[str, Any]]:
    """The measured plans that the rule takes, by the name of their budget."""
    curve = json.loads(budget_json.read_text(encoding="utf-8"))["curve"]
    found = {}
    for name, nats in BUDGETS.items():
        held = [
            one
            for one in curve["curve"]
            if one["family"] == "sparsity" and all(test["upper"] <= nats for test in one["test"].values())
        ]
        found[name] = max(held, key=lambda one: one["budget"])
    return found


def mapped(record: dict[str, Any], model: Any) -> tuple[Plan, float]:
    """The plan for a model of another shape, and how many times fewer causal pairs it reads at 32k."""
    config, modules = model.config, dict(attention_modules(model, model.config.model_type))
    heads = config.num_key_value_heads
    layers, windows = [], []
    for place, index in enumerate(sorted(modules)):
        own = record["picks"][place * LAYERS // len(modules) * HEADS :]
        spans = [window_of(own[head * HEADS // heads]) or (ALL, 0) for head in range(heads)]
        choices = tuple(EXACT if span[0] == ALL else Choice.of(Window(*span)) for span in spans)
        layers.append(LayerPlan(index, hashes.weight_hash(modules[index]), choices))
        windows += [window for window, _ in spans]
    plan = Plan(
        format=PLAN_FORMAT,
        model_type=config.model_type,
        weight_hash=hashes.model_hash(model),
        configuration=computes_by(config),
        dtype=parts.module_dtype(next(iter(modules.values()))),
        adaattn=importlib.metadata.version("adaattn-hf"),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        budget=record["budget"],
        seed=0,
        data_fingerprint="",
        protocol={},
        lengths=(LONGEST,),
        layers=tuple(layer for layer in layers if not layer.is_exact),
        units=(),
        verified=None,
        tensors="",
    )
    return plan, 1 / seen_share(32768, tuple(windows))


def _milliseconds(call: Callable[[], Any], most: float) -> float:
    """The least of as many calls as fit into so many seconds, one at least, behind one that warms."""
    call()
    times: list[float] = []
    while not times or (sum(times) < most and len(times) < 100):
        if ON_CUDA:
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if ON_CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


@torch.no_grad()
def model(section: Section) -> None:
    """Prefill of one sequence, then decode steps behind a filled cache."""
    found = shaped("8b" if ON_CUDA else "tiny", DEVICE)
    found = found if ON_CUDA else found.float()
    found.set_attn_implementation("adaattn")
    plans = {
        name: mapped(record, found)
        for name, record in records(Path(__file__).parents[2] / "docs" / "results" / "budget.json").items()
    }
    ways: dict[str, tuple[str, Plan | None]] = {"sdpa": ("sdpa", None), "exact": ("adaattn", None)}
    ways |= {f"plan {name}": ("adaattn", plan) for name, (plan, _) in plans.items()}
    reads = "; ".join(f"plan {name}: {less:.2f} times fewer pairs at 32k" for name, (_, less) in plans.items())
    for thousand in (8, 32, 128):
        section.add(f"prefill {thousand}k, ms", partial(_prefill, found=found, ways=ways, n=length(thousand * 1024)))
    for thousand in (8, 32, 128):
        section.add(
            f"decode behind {thousand}k, ms a step",
            partial(_decode, found=found, ways=ways, n=length(thousand * 1024), reads=reads),
        )


@contextlib.contextmanager
def by(found: Any, implementation: str, plan: Plan | None) -> Any:
    """A model with an implementation, and a plan if there is one."""
    found.set_attn_implementation(implementation)
    if plan is not None:
        attach.attach(found, plan, unverified=True)
    try:
        yield
    finally:
        remove_plan(found)


def _prefill(row: Cell, found: Any, ways: dict[str, tuple[str, Plan | None]], n: int) -> None:
    tokens = torch.randint(0, 64, (1, n), device=DEVICE)

    def call() -> Any:
        return found(tokens, use_cache=False, logits_to_keep=1)

    for name, (implementation, plan) in ways.items():
        with by(found, implementation, plan):
            row[name] = _milliseconds(call, 2.0 if ON_CUDA else 0.0)


def _decode(row: Cell, found: Any, ways: dict[str, tuple[str, Plan | None]], n: int, reads: str) -> None:
    token = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
    stock = {arm.name: arm for arm in ARMS}
    made: list[tuple[str, str, Plan | None]] = [
        ("sdpa", "DynamicCache", None),
        ("sdpa, StaticCache", "StaticCache", None),
    ]
    made += [(name, "AdaAttnCache model", plan) for name, (way, plan) in ways.items() if way == "adaattn"]
    for name, cache_name, plan in made:
        arm = stock[cache_name]
        with by(found, arm.implementation, plan):
            cache = filled(arm, found, 1, n, n + 256)
            row[name] = _milliseconds(partial(found, token, past_key_values=cache), 0.5 if ON_CUDA else 0.0)
            del cache
    row["note"] = reads
