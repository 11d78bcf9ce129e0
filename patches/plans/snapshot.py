"""What a planned model is: its weights, and the settings that attention reads, compared at the start of each pass."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .configured import computes_by
from .hashes import tensor_hash
from .parts import ADAPTERS, Part, inner_of, parts
from .weights import Weights

_get: Any = dict.get
_unwrapped: list[int] = []
"""One entry for each time that an adapter left a model: it may have merged, past all counters."""


@cache
def listen() -> None:
    """Hears of children that are registered in the place of others, once there is a model to watch."""

    # An adapter that is put on and merged between two passes writes to `.data`, which no counter of torch sees, and
    # leaves the very modules and tensors that were there before: that it went is all that can be noticed.
    def registered(parent: nn.Module, name: str, child: Any) -> None:
        before = parent._modules.get(name)
        if before is not None and child is not None and inner_of(before, ADAPTERS) is child:
            _unwrapped.append(1)

    register_module_module_registration_hook(registered)


class Snapshot:
    """What a model was when its plan was checked: its weights, and the settings that attention reads."""

    def __init__(self, trunk: nn.Module) -> None:
        inside = [*parts(trunk)]
        read = [part.module for part in inside if _read_by_attention(part)]
        said: list[tuple[dict[str, Any], str]] = [(vars(one), "config") for one in read if "config" in vars(one)]
        values = [room[name] for room, name in said]
        owners = {id(config): config for part in inside if (config := getattr(part.module, "config", None)) is not None}
        for one in (*owners.values(), *read):
            said += [(vars(one), name) for name in computes_by(one)]
        self.values = values + [deepcopy(room[name]) for room, name in said[len(values) :]]
        self.rooms, self.names = zip(*said, strict=True)
        self.weights, self.unwrapped = Weights.of(trunk), len(_unwrapped)
        # what stands around a projection of attention may compute something else, though it holds no weights
        self.names_inside = {
            part.module: [inner.prefix + name for inner in parts(part.module) for name in inner.weights]
            for part in inside
            if hasattr(part.module, "is_causal")
        }

    def covers(self, later: Snapshot) -> bool:
        """Whether the weights of a later snapshot are these, so that they need not be read again."""
        named = all(self.names_inside.get(module, names) == names for module, names in later.names_inside.items())
        return named and self.unwrapped == later.unwrapped and self.weights.covers(later.weights)

    def same(self) -> bool:
        """Whether nothing has changed; asked in every pass, so done by iterators."""
        now = [*map(_get, self.rooms, self.names)]
        return self.unwrapped == len(_unwrapped) and self.weights.same() and now == self.values


def _read_by_attention(part: Part) -> bool:
    """Whether a module's settings are attention's own, or those of rotary embeddings."""
    module = part.module
    return (hasattr(module, "is_causal") and hasattr(module, "config")) or len(part.steady) > len(part.buffers)


def facts_of(trunk: nn.Module) -> dict[str, Any]:
    """Settings of attention and the numbers of passing buffers, by name.

    A layer is named by its own number: the second stage of a pipeline holds layer 7, say, as its first.
    """
    found: dict[str, Any] = {}
    for part in filter(_read_by_attention, parts(trunk)):
        number = getattr(part.module, "layer_idx", None)
        prefix = part.prefix if number is None else re.sub(r"\d+", str(number), part.prefix, count=1)
        found |= {prefix + name: value for name, value in computes_by(part.module).items()}
        for name in part.steady.keys() - part.buffers.keys():
            found[f"{prefix}{name} {[*part.steady[name].shape]}"] = tensor_hash(part.steady[name])[:16]
    return found
