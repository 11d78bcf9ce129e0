"""The attention layers of a model: which modules they are, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from adaattn_hf.plans.plan import PlanError

_NUMBERED = "_adaattn_numbered"


def attention_modules(model: nn.Module, model_type: str) -> Iterator[tuple[int, nn.Module]]:
    """Yields the innermost modules that know a `layer_idx` and hold weights, of the tower of that model type.

    Raises:
        PlanError: If two of them claim the same index: a plan could not tell them apart.
    """
    number_layers(model)
    seen: dict[int, str] = {}
    for name, module in model.named_modules():
        index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
        if not isinstance(index, int) or config is None or config.model_type != model_type:
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
    """Whether a module has weights; quantised ones lie in buffers."""
    return any(True for held in (module.parameters(), module.buffers()) for _ in held)


def number_layers(model: nn.Module) -> bool:
    """Numbers the attention modules of a model without any `layer_idx` (DistilBERT), in the order of the model.

    Returns:
        Whether this package has numbered them, now or before.
    """
    modules = [
        module
        for module in model.modules()
        if hasattr(module, "is_causal") and hasattr(module, "config") and _holds_weights(module)
    ]
    numbered = [module for module in modules if isinstance(getattr(module, "layer_idx", None), int)]
    if not numbered:
        for index, module in enumerate(modules):
            module.layer_idx = index  # type: ignore[assignment]
            module.__dict__[_NUMBERED] = True
    return any(_NUMBERED in module.__dict__ for module in modules)
