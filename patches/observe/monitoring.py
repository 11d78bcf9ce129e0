"""Watches a model with a plan while it runs; `plans.monitor` says what is counted and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.listeners import Listener, listening
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.monitor import Monitor

from ..models.support import Holder, model_in
from ..plans.bound import BoundPlan, bound_plan, checked_layer
from ..plans.layers import attention_modules


def watched(module: nn.Module, bound_layer: BoundLayer, call: AttentionCall) -> BoundLayer:
    """Records a call of a layer whose settings ask for monitoring; returns the layer to run.

    Settings that are set anew begin anew.
    """
    bound: BoundPlan = bound_layer.owner()
    config: Any = module.config
    if bound.monitor is None or bound.session is not config.adaattn:
        bound.monitor, bound.session = Monitor(bound.plan), config.adaattn
    running: BoundLayer | None = bound.monitor.watch(bound_layer.plan.layer, bound_layer, call, module.training)
    assert running is not None
    return running


@contextmanager
def monitoring(model: Holder, *, sample_rows: bool = True) -> Iterator[Monitor]:
    """Monitors a model with a plan inside the `with` block, and keeps the counters for `statistics`.

    Args:
        model: A model that carries a plan, or what holds it (a pipeline, PEFT, sentence-transformers).
        sample_rows: Compare sampled rows with exact attention and make heads exact; otherwise only count.

    Raises:
        ValueError: If the model carries no plan.
    """
    root = model_in(model)
    bound = bound_plan(root)
    if bound is None:
        raise ValueError("the model carries no plan, so there is nothing to watch; make one with `adaattn calibrate`")
    monitor = bound.monitor = Monitor(bound.plan, sample_rows=sample_rows)
    bound.session = None
    layers = {id(module): index for index, module in attention_modules(root, bound.plan.model_type)}

    def run_what_is_left(module: nn.Module, call: AttentionCall) -> Tensor | None:
        if id(module) not in layers:
            return None
        bound_layer = monitor.watch(layers[id(module)], checked_layer(module), call.dequantised(), module.training)
        return None if bound_layer is None else execute.attend(bound_layer, call, call.backend).out

    with listening(Listener(answer=run_what_is_left, whole="adaattn_hf.monitoring")):
        yield monitor


def statistics(model: Holder) -> list[dict[str, Any]]:
    """Returns the counters of each layer, activation rate included: of the last `monitoring` block, or of the
    monitor that `config.adaattn["monitor"]` asks for; empty where nothing was watched."""
    bound = bound_plan(model_in(model))
    if bound is None or bound.monitor is None:
        return []
    counted = sorted(bound.monitor.layers.items())
    return [{**asdict(counters), "activation": counters.activation} for _, counters in counted]
