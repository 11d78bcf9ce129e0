"""The door of a planned model: at the start of each pass it compares the model with what its plan was checked on.

What a plan was verified on: weights and buffers, the order of layers, and the settings that attention reads. A door
only notices that something is another; layers then check their parts of the plan anew, and refuse in words.
"""

from __future__ import annotations

import re
import weakref
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from adaattn_hf.plans.record import PlanError

from .configured import computes_by
from .hashes import base_of, tensor_hash
from .layers import model_of
from .parts import ADAPTERS, Part, inner_of, parts
from .weights import Weights

_pass: ContextVar[tuple[Any, Any]] = ContextVar("adaattn_pass", default=(None, None))
"""The stamp of the model whose pass runs in this thread, and what was here before."""
running = _pass.get
_get: Any = dict.get
_unwrapped: list[int] = []
"""One entry for each time that an adapter left a model: it may have merged, past all counters."""


class Stamp(weakref.ref["Door"]):
    """Stands for a checked state in the layers, and knows the door without keeping it.

    Copies and pickles are None, as a copied layer is part of no model yet.
    """

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@dataclass(eq=False)
class State:
    """What a model was when its plan was checked: weights, also by name, and settings that attention reads.

    Of each setting `rooms` holds the dictionary; `hash` is that of the weights, empty before it is needed.
    """

    weights: Weights
    order: dict[str, Tensor]
    rooms: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    values: list[Any]
    stamp: Stamp
    unwrapped: int = field(default_factory=_unwrapped.__len__)
    hash: str = ""

    @classmethod
    def of(cls, trunk: nn.Module, door: Door) -> State:
        """What a model is now."""
        inside = [*parts(trunk)]
        read = [part.module for part in inside if _read_by_attention(part)]
        said: list[tuple[dict[str, Any], str]] = [(vars(one), "config") for one in read if "config" in vars(one)]
        values = [room[name] for room, name in said]
        owners = {id(config): config for part in inside if (config := getattr(part.module, "config", None)) is not None}
        for one in (*owners.values(), *read):
            said += [(vars(one), name) for name in computes_by(one)]
        values += [deepcopy(room[name]) for room, name in said[len(values) :]]
        held = ((part.prefix + name, one) for part in inside for name, one in part.weights.items())
        rooms, names = zip(*said, strict=True)
        return cls(Weights.of(trunk, whole=True), dict(held), rooms, names, values, Stamp(door))

    def same(self) -> bool:
        """Whether nothing has changed; asked in every pass, so done by iterators."""
        now = [*map(_get, self.rooms, self.names)]
        return self.unwrapped == len(_unwrapped) and self.weights.same() and now == self.values

    def goes_on(self, later: State) -> bool:
        """Whether the weights of a later state are these: inside new modules, or as many as a pipeline's stage keeps.

        A stage lacks layers, up to an end of the model that is none (embeddings, a norm).
        """
        names, mine, held = [*self.order], [*self.order.values()], [*later.order.values()]
        start = next((at for at, weight in enumerate(mine) if held and weight is held[0]), len(mine))
        end = start + len(held)
        layers = [any(map(str.isdigit, name.split("."))) for name in (*names[:start], *names[end:])]
        ends = [*layers[:start][:1], *layers[start:][-1:]]
        kept = end <= len(mine) and all(map(is_, mine[start:end], held)) and self.weights.unwritten()
        return kept and self.unwrapped == later.unwrapped and (not layers or (any(layers) and not any(ends)))


def _read_by_attention(part: Part) -> bool:
    """Whether a module's settings are attention's own, or those of rotary embeddings."""
    module = part.module
    return (hasattr(module, "is_causal") and hasattr(module, "config")) or len(part.steady) > len(part.buffers)


class Door:
    """The hooks before and behind a pass; copies and pickles of a model have doors that checked nothing yet.

    `first` are settings and passing buffers at the first check: no plan names those. `adapting` is the plan under which
    adapters alone are trained. `state` is None once something has changed; `last` is what was checked last.
    """

    def __init__(self, first: dict[str, Any] | None = None, adapting: Any = None) -> None:
        self.first, self.adapting = first or {}, adapting
        self.state: State | None = None
        self.last: State | None = None
        self.trunk: Any = type(None)

    def __reduce__(self) -> tuple[type[Door], tuple[Any, ...]]:
        return Door, (self.first, self.adapting)

    def enter(self, trunk: nn.Module, _: Any) -> None:
        """Called by torch before a pass."""
        if not torch.compiler.is_compiling():
            if self.state is not None and not self.state.same():
                self.state = None
            _pass.set((None if self.state is None else self.state.stamp, running()))

    def leave(self, trunk: nn.Module, _: Any, out: Any) -> None:
        """Called by torch behind a pass, be it by an exception."""
        if not torch.compiler.is_compiling():
            _pass.set(running()[1] or (None, None))

    def now(self) -> State:
        """The state to check: what was noted, where nothing has changed since."""
        if self.state is None or not self.state.same():
            self.state = State.of(self.trunk(), self)
            if self.last is not None and self.last.goes_on(self.state):
                self.state.hash = self.last.hash
        return self.state

    def facts(self) -> dict[str, Any]:
        """Settings of attention and the numbers of passing buffers, by name.

        A layer is named by its own number: the second stage of a pipeline holds layer 7, say, as its first.
        """
        found: dict[str, Any] = {}
        for part in filter(_read_by_attention, parts(self.trunk())):
            number = getattr(part.module, "layer_idx", None)
            prefix = part.prefix if number is None else re.sub(r"\d+", str(number), part.prefix, count=1)
            found |= {prefix + name: value for name, value in computes_by(part.module).items()}
            for name in part.steady.keys() - part.buffers.keys():
                found[f"{prefix}{name} {[*part.steady[name].shape]}"] = tensor_hash(part.steady[name])[:16]
        return found

    def refuse_foreign(self, module: nn.Module) -> None:
        """Refuses a layer that another model runs in its pass (PlanError); it may well run by itself."""
        host, trunk = model_of(module), self.trunk()
        if host is not None and not (trunk in {*host.modules()} or host in {*trunk.modules()}):
            raise PlanError(
                f"{type(module).__name__} of layer {getattr(module, 'layer_idx', None)} runs in another model "
                f"({type(host).__name__}) than the one that its plan was checked for; put the layer back, or remove "
                "the plan with adaattn_hf.remove_plan(model)"
            )


def door_of(model: nn.Module) -> Door:
    """The door of a model, opened if it has none."""
    trunk = base_of(model)
    owners = (getattr(hook, "__self__", None) for hook in trunk._forward_pre_hooks.values())
    door = next((owner for owner in owners if isinstance(owner, Door)), None)
    if door is None:
        door = Door()
        trunk.register_forward_pre_hook(door.enter)
        trunk.register_forward_hook(door.leave, always_call=True)
    _listen()
    door.trunk = weakref.ref(trunk)
    return door


def remove_doors(model: nn.Module) -> None:
    """Takes away the doors of a model and its parts."""
    for part in model.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Door)]:
                del hooks[key]
                part._forward_hooks_always_called.pop(key, None)


@cache
def _listen() -> None:
    """Hears of children that are registered in the place of others, once there is a model to watch."""

    def registered(parent: nn.Module, name: str, child: Any) -> None:
        before = parent._modules.get(name)
        if before is not None and child is not None and inner_of(before, ADAPTERS) is child:
            _unwrapped.append(1)

    register_module_module_registration_hook(registered)
