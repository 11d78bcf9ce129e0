"""Watches a model with a plan while it runs; `plans.monitor` says what is counted and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from adaattn_hf.attention.listeners import Listener, listening
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.plans import execute
from adaattn_hf.plans.monitor import Monitor
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.store import CONFIG_KEY

from ..models.support import Holder, model_in
from ..plans.attach import plan_of
from ..plans.fit import program_of
from ..plans.layers import attention_modules

_SLOT = "_adaattn_monitor"
_shared: WeakValueDictionary[int, Monitor] = WeakValueDictionary()


def watched(module: nn.Module, program: Program, request: AttentionRequest) -> Program:
    """Records a call of a layer whose settings ask for monitoring; returns the program to run.

    The layers of a model share one monitor, as long as their settings are the same object.
    """
    config: Any = module.config
    raw = config.adaattn
    known = module.__dict__.get(_SLOT)
    if known is None or known[0] is not raw:
        monitor = _shared.get(id(raw))
        if monitor is None:
            monitor = Monitor(Plan.from_dict(raw[CONFIG_KEY]))
            _shared[id(raw)] = monitor
        known = module.__dict__[_SLOT] = (raw, monitor)
    running = known[1].watch(program.plan.layer, program, request, module.training)
    assert running is not None
    return running


@dataclass(eq=False)
class Watch(Listener):
    """Lets a monitor watch layers, by `id` of the module, which then run by what it leaves of the plan."""

    whole = "adaattn_hf.monitoring"
    monitor: Monitor
    layers: Mapping[int, int]

    def answer(self, module: nn.Module, call: AttentionRequest) -> Tensor | None:
        """Count the call, compare sampled rows, and run what is left of the plan."""
        if id(module) not in self.layers:
            return None
        index, program = self.layers[id(module)], program_of(module)
        program = self.monitor.watch(index, program, call.widened(), module.training)
        return None if program is None else execute.attend(program, call, call.backend).out


@contextmanager
def monitoring(model: Holder, *, sample_rows: bool = True) -> Iterator[Monitor]:
    """Monitors a model with a plan inside the `with` block, and keeps the counters for `statistics`.

    Args:
        model: A model that carries a plan, or what holds it (a pipeline, PEFT, sentence-transformers).
        sample_rows: Compare sampled rows with exact attention and make heads exact; otherwise only count.

    Raises:
        ValueError: If the model carries no plan.
    """
    held = model_in(model)
    plan = plan_of(held)
    if plan is None:
        raise ValueError("the model carries no plan, so there is nothing to watch; make one with `adaattn calibrate`")
    monitor = Monitor(plan, sample_rows=sample_rows)
    layers = {id(module): index for index, module in attention_modules(held, plan.model_type)}
    held.__dict__[_SLOT] = (None, monitor)
    with listening(Watch(monitor, layers)):
        yield monitor


def statistics(model: Holder) -> list[dict[str, Any]]:
    """Returns the counters of each layer, activation rate included: of the last `monitoring` block, or of the
    monitor that `config.adaattn["monitor"]` asks for; empty where nothing was watched."""
    found = (module.__dict__[_SLOT][1] for module in model_in(model).modules() if _SLOT in module.__dict__)
    monitor: Monitor | None = next(found, None)
    if monitor is None:
        return []
    return [{**asdict(counters), "activation": counters.activation} for _, counters in sorted(monitor.layers.items())]
