"""Small plans for small models, without a calibration; adapters on such models, and steps of training."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import some_heads
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.patches.plans.configured import computes_by
from adaattn_hf.patches.plans.hashes import model_hash, weight_hash
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.choices import Choice
from adaattn_hf.plans.plan import PLAN_FORMAT, LayerPlan, Plan, Verified

from .models import tokens

PROVEN = Verified(True, 1e-4, 5e-4, 0.95, 1, 12, 4000, 2e-4, 1e-2, 0.995, None, None, 1.0, 1.0, 2e-4, "passed")
"""A verdict for plans whose proof is not what a test is about."""


def plan_for(
    model: Any,
    choice: Choice | Mapping[int, tuple[Choice, ...]],
    layers: tuple[int, ...] = (0, 1),
    lengths: tuple[int, ...] = (64,),
    **fields: Any,
) -> Plan:
    """One choice for every key/value head of some layers, or the choices of each layer; `fields` win over these."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    modules = dict(attention_modules(model, config.model_type))
    chosen = dict.fromkeys(layers, (choice,) * heads) if isinstance(choice, Choice) else choice
    given: dict[str, Any] = dict(
        format=PLAN_FORMAT, model_type=config.model_type, weight_hash=model_hash(model),
        configuration=computes_by(next(iter(modules.values())).config), dtype=str(model.dtype).removeprefix("torch."),
        adaattn="0.1.0", torch="2.13.0", transformers="5.17.0", budget=1e-3, seed=0, data_fingerprint="", protocol={},
        lengths=lengths, layers=tuple(LayerPlan(i, weight_hash(modules[i]), own) for i, own in chosen.items()),
        units=(), verified=PROVEN, tensors="", attention_layers=(),
    )  # fmt: skip
    return Plan(**given | fields)


def defined(made: BoundLayer, call: AttentionCall) -> torch.Tensor:
    """What a layer's plan computes head by head, by the definitions of its choices in double precision."""
    heads = enumerate(made.plan.choices)
    parts = [choice.defined(some_heads(call, [head]), [head], made.tensors) for head, choice in heads]
    return torch.cat([reference.attention(part).out for part in parts], dim=2)


def give(model: Any, choice: Choice, **where: Any) -> Plan:
    """Binds a plan of one choice to a model."""
    plan = plan_for(model, choice, **where)
    load_plan(model, plan)
    return plan


def lora(model: Any, *targets: str, **more: Any) -> Any:
    """A model of language with adapters of rank 2 on some layers, or on projections of queries and values."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    modules = list(targets or ("q_proj", "v_proj"))
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=modules, task_type="CAUSAL_LM", **more))


def stepped(model: Any, steps: int = 3) -> Any:
    model.train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def said(heard: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in heard.records)
