"""The attention layers of a model: which modules they are, their numbers, and the model that a layer belongs to."""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from adaattn_hf.plans.plan import PlanError


def attention_modules(model: nn.Module, model_type: str | None = None) -> Iterator[tuple[int, nn.Module]]:
    """Yields the innermost modules with `layer_idx` and weights, of a tower if named; PlanError if two claim one."""
    number_layers(model)
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
        if not isinstance(index, int) or config is None or model_type not in (None, config.model_type):
            continue
        if not _attends(module):
            continue
        if index in names:
            raise PlanError(
                f"{names[index]} and {name} both are layer {index}; plans serve models of one attention per layer"
            )
        names[index] = name
        yield index, module


def _attends(module: nn.Module) -> bool:
    tensors = (one for found in (module.parameters, module.buffers) for one in found())
    return hasattr(module, "is_causal") and hasattr(module, "config") and any(True for _ in tensors)


def number_layers(model: nn.Module) -> None:
    """Numbers the attention modules of a model without any `layer_idx` (DistilBERT), in the order of the model."""
    modules = [*filter(_attends, model.modules())]
    if not any(isinstance(getattr(module, "layer_idx", None), int) for module in modules):
        for index, module in enumerate(modules):
            module.layer_idx = index  # type: ignore[assignment]


def running_model(module: nn.Module) -> nn.Module | None:
    """Returns the outermost Transformers model in whose pass a module runs; None where it runs by itself.

    A layer does not know its model, so the call stack is asked: for planned layers outside of a pass that their own
    model began, and by the kernel of the Hub, to which nobody gives a model. A bound plan cannot tell: its hooks lie on
    its own model, and a layer that another model runs is refused while one that is run by itself is served.
    """
    frame: Any = sys._getframe(1)
    outermost: nn.Module | None = None
    while frame is not None:
        # what is read of a frame lives as long as that: of no other function, whose caller may delete a model
        host: Any = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if host is not outermost and hasattr(type(host), "base_model_prefix") and module in {*host.modules()}:
            outermost = host
        frame = frame.f_back
    return outermost
