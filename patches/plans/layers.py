"""The attention layers of a model: which modules they are, their numbers, and the model that a layer belongs to."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from adaattn_hf.plans.plan import PlanError


def attention_modules(model: nn.Module, model_type: str | None = None) -> Iterator[tuple[int, nn.Module]]:
    """Yields the innermost modules with `layer_idx` and weights, of a tower if named; PlanError if two claim one."""
    number_layers(model)
    seen: dict[int, str] = {}
    for name, module in model.named_modules():
        index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
        if not isinstance(index, int) or config is None or model_type not in (None, config.model_type):
            continue
        if not _holds_weights(module) or not hasattr(module, "is_causal"):
            continue
        if index in seen:
            raise PlanError(
                f"{seen[index]} and {name} both are layer {index}; plans serve models of one attention per layer"
            )
        seen[index] = name
        yield index, module


def _holds_weights(module: nn.Module) -> bool:
    return any(True for held in (module.parameters(), module.buffers()) for _ in held)


def number_layers(model: nn.Module) -> None:
    """Numbers the attention modules of a model without any `layer_idx` (DistilBERT), in the order of the model."""
    modules = [
        module
        for module in model.modules()
        if hasattr(module, "is_causal") and hasattr(module, "config") and _holds_weights(module)
    ]
    if not any(isinstance(getattr(module, "layer_idx", None), int) for module in modules):
        for index, module in enumerate(modules):
            module.layer_idx = index  # type: ignore[assignment]


def model_of(module: nn.Module) -> nn.Module | None:
    """Returns the Transformers model that holds a module, the outermost one; None for a module of no model.

    A layer does not know its model, so what refers to it is asked, level by level. It is done once per model and plan,
    and not where `adaattn_hf.load_plan` names the model.

    Raises:
        PlanError: Objects are frozen (`gc.freeze`), so that models may live that cannot be asked.
    """
    level, around = [module], {id(module): module}
    while level:
        level = [one for one in _holders(level) if id(one) not in around]
        around |= {id(one): one for one in level}
    found = [one for one in around.values() if hasattr(type(one), "base_model_prefix")]
    if not found and gc.get_freeze_count():
        raise PlanError(
            f"the model of this {type(module).__name__} cannot be found behind gc.freeze(), expected it for a check of "
            "its weights; call adaattn_hf.load_plan(model) before"
        )
    return max(found, key=lambda model: sum(1 for _ in model.modules()), default=None)


def _holders(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that hold some of these.

    `gc.get_objects` would find them sooner, but its list refers to tuples that other threads are making, in which
    Python then raises a SystemError.
    """
    registries = _dictionaries(modules)
    own = _dictionaries(registries)
    owners = [one for one in gc.get_referrers(*registries, *own) if issubclass(type(one), nn.Module)]
    return [one for one in owners if any(vars(one).get("_modules") is registry for registry in registries)]


def _dictionaries(of: Sequence[Any]) -> list[dict[Any, Any]]:
    return [one for one in gc.get_referrers(*of) if type(one) is dict]
