"""Notices where a part of a planned model is replaced: weights that were merged before may leave no other trace.

Merging an adapter writes into weights past their version counters, and unloading it puts the very layer back that stood
there before. Every registration of a child passes a hook of torch, which knows the child that is there already.
"""

from __future__ import annotations

from functools import cache
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .parts import ADAPTERS, inner_of
from .running import ADAPTED, say

_watched: WeakKeyDictionary[nn.Module, tuple[str, tuple[str, ...]]] = WeakKeyDictionary()
_COUNT = "_adaattn_replaced"
"""Attribute in which a model counts its parts that were replaced by others."""


def watch(model: nn.Module, weights: str, slots: tuple[str, ...]) -> None:
    """Lets a model forget what checks of its weights found once one of its parts is replaced by another."""
    _listen()
    _watched[model] = weights, slots


def replacements(model: nn.Module) -> int:
    """Returns how often a part of a watched model was replaced by another."""
    return int(model.__dict__.get(_COUNT, 0))


@cache
def _listen() -> None:
    """Registers the hook, once there is a model to watch."""
    register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    before = parent._modules.get(name)
    if before is None or child is None or child is before:
        return
    known = {id(part) for part in before.modules()}
    unwraps = inner_of(before, ADAPTERS) is child
    # a part of what was there, as a pipeline's stage keeps it, is as good as it was, and so is what has no weights
    fresh = [part for part in child.modules() if id(part) not in known]
    held = (one for part in fresh for one in (*part._parameters.values(), *part._buffers.values()))
    brings = any(one is not None for one in held)
    wraps = any(part is before for part in child.modules())
    for model, (weights, slots) in list(_watched.items()):
        modules = [*model.modules()]
        if not any(part is parent for part in modules):
            continue
        if unwraps or (brings and not wraps):
            model.__dict__[_COUNT] = replacements(model) + 1
            for part in modules:
                for slot in slots:
                    part.__dict__.pop(slot, None)
        elif inner_of(child, ADAPTERS) is before:
            say(weights, ADAPTED)
