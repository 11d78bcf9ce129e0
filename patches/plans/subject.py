"""What `calibration` needs to know of a model and cannot ask its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from adaattn_hf.plans.plan import EXACT, PLAN_FORMAT, LayerPlan, Plan

from ..models.positions import learned_positions, stated_positions
from .configured import computes_by
from .hashes import model_hash, weight_hash
from .layers import attention_modules
from .parts import module_dtype


def refuse_unless_adaattn(model: nn.Module) -> None:
    """Refuses a model whose attention is not "adaattn", the one without a forced backend (ValueError)."""
    config: Any = model.config
    if config._attn_implementation != "adaattn":
        raise ValueError(
            f"attn_implementation is {config._attn_implementation!r}, expected 'adaattn': "
            'load the model with from_pretrained(..., attn_implementation="adaattn")'
        )


def longest_input(model: nn.Module) -> int | None:
    """The longest input that a model can read."""
    limits = (learned_positions(model), stated_positions(model.config))
    return min((count for count in limits if count is not None), default=None)


def exact_plan(model: nn.Module, indices: Sequence[int], adaattn: str) -> Plan:
    """A plan, made by our version `adaattn`, that names these layers and leaves each exact: others are made from it."""
    _, first = next(attention_modules(model), (0, None))
    if first is None:
        raise ValueError("the model has no attention modules with a layer_idx; a plan could not name its layers")
    config: Any = first.config
    modules = dict(attention_modules(model, config.model_type))
    layers = tuple(LayerPlan(index, weight_hash(modules[index]), (EXACT,)) for index in indices)
    return Plan(
        format=PLAN_FORMAT, model_type=str(config.model_type), weight_hash=model_hash(model),
        configuration=computes_by(config), dtype=module_dtype(modules[indices[0]]),
        adaattn=adaattn, torch=torch.__version__, transformers=version("transformers"),
        budget=0.0, seed=0, data_fingerprint="", protocol={}, lengths=(), layers=layers, units=(), verified=None,
        tensors="", attention_layers=tuple(indices),
    )  # fmt: skip
