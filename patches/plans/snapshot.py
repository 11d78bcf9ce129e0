"""What a planned model is, compared at the start of each pass: its weights, and the settings that attention reads."""

import re
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..models.positions import configs_of
from .configured import computes_by
from .hashes import tensor_hash
from .parts import ADAPTERS, Part, inner_of, parts, pieces

_version, _pointer = attrgetter("_version"), torch.Tensor.data_ptr
_get: Any = dict.get
_values: Any = dict.values
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
    """What a model was when its plan was checked: its weights, and the settings that attention reads.

    Its weights are its own: parameters and buffers inside wrappers, not what adapters add and training changes. Every
    pass asks whether they are the same, so it is all done by iterators, without a step of Python for each weight.

    Attributes:
        rooms, names, values: The dictionary of each setting, its name there, and its value.
        adapted: Whether there are layers with adapters.
        tensors, pointers: Its weights, and the memory address of each.
        counted, versions: Those that count changes in place (tensors of `torch.inference_mode` do not), and counters.
        holders, lengths: The dictionaries of parameters and children of all submodules and wrappers, and their sizes.
        contents: All the values of these, one dictionary after the other.
        buffers: Dictionary, name and value of each buffer that no pass changes; others may come and go beside it.
        order: Its weights by their names, in the order of the model.
        inside: By attention module, the names of the weights that it holds.
    """

    def __init__(self, trunk: nn.Module) -> None:
        inside = [*parts(trunk)]
        read = [part.module for part in inside if _read_by_attention(part)]
        settings: list[tuple[dict[str, Any], str]] = [
            (vars(module), "config") for module in read if "config" in vars(module)
        ]
        values = [room[name] for room, name in settings]
        for owner in (*configs_of(part.module for part in inside), *read):
            settings += [(vars(owner), name) for name in computes_by(owner)]
        self.values = values + [deepcopy(room[name]) for room, name in settings[len(values) :]]
        self.rooms, self.names = [room for room, _ in settings], [name for _, name in settings]
        # what stands around a projection of attention may compute something else, though it holds no weights
        self.inside = {
            part.module: [inner.prefix + name for inner in parts(part.module) for name in inner.weights]
            for part in inside
            if hasattr(part.module, "is_causal")
        }
        self.adapted = any(inner_of(wrapper, ADAPTERS) is not None for part in inside for wrapper in part.wrappers)
        self.unwrapped = len(_unwrapped)

        self.holders: list[dict[str, Any]] = []
        weights: list[torch.Tensor] = []
        for part in inside:
            parameters = {name: weight for name, weight in part.module._parameters.items() if weight is not None}
            # accelerate offloads weights and brings them for each pass, FSDP makes them of its flat ones
            if not any(weight.is_meta or hasattr(weight, "_fsdp_flattened") for weight in parameters.values()):
                self.holders += [part.module._parameters] if part.module._parameters else []
                weights += parameters.values()
            elif (offloaded := getattr(getattr(part.module, "_hf_hook", None), "weights_map", None)) is not None:
                pairs = [(offloaded[name], offloaded[name]) for name, weight in parameters.items() if weight.is_meta]
                weights += [weight for weight, again in pairs if weight is again]  # from a disk they are read anew
            self.holders += [module._modules for module in (part.module, *part.wrappers) if module._modules]
        steady = [(part.module._buffers, name, buffer) for part in inside for name, buffer in part.steady.items()]
        self.buffers: Any = [*zip(*steady, strict=True)] or [(), (), ()]
        self.tensors = [piece for weight in (*weights, *self.buffers[2]) for piece in pieces(weight)]
        self.counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.versions, self.pointers = [*map(_version, self.counted)], [*map(_pointer, self.tensors)]
        self.lengths, self.contents = [*map(len, self.holders)], [*chain.from_iterable(map(_values, self.holders))]
        self.order = {part.prefix + name: weight for part in inside for name, weight in part.weights.items()}

    def same(self) -> bool:
        """Whether nothing has changed."""
        now = [*map(_get, self.rooms, self.names)]
        return self.unwrapped == len(_unwrapped) and self.same_weights() and now == self.values

    def same_weights(self) -> bool:
        """Whether no weight was modified in place, replaced, cast or wrapped."""
        rooms, names, buffers = self.buffers
        return (
            self._unwritten()
            and [*map(len, self.holders)] == self.lengths
            and all(map(is_, chain.from_iterable(map(_values, self.holders)), self.contents))
            and all(map(is_, map(_get, rooms, names), buffers))
        )

    def _unwritten(self) -> bool:
        return [*map(_version, self.counted)] == self.versions and [*map(_pointer, self.tensors)] == self.pointers

    def covers(self, later: Self) -> bool:
        """Whether the weights of a later snapshot are these, or a stage of them, so that they need not be read again.

        They may be in other containers.
        """
        return (
            self.unwrapped == later.unwrapped
            and all(self.inside.get(module, names) == names for module, names in later.inside.items())
            and self._unwritten()
            and is_stage(self.order, *([*map(id, each.order.values())] for each in (self, later)))
        )


PLACE = re.compile(r"\D*\d+(?=\.)")
"""The place of a layer in its model: all up to the first number."""


def is_stage(names: Iterable[str], whole: list[Any], part: list[Any]) -> bool:
    """Whether a part of a model's weights, told by `names` in their order, is all of them or a pipeline's stage.

    A stage keeps one run of them in their order. At each end where it lacks layers, it lacks what stands between them
    and that end, too (embeddings, a last norm): a model that only lost layers is no stage.
    """
    starts = range(len(whole) - len(part) + 1)
    start = next((at for at in starts if whole[at : at + len(part)] == part), len(whole))
    layered = [PLACE.match(name) is not None for name in names]
    before, behind = layered[:start], layered[start + len(part) :]
    return start < len(whole) and (not before + behind or (any(before + behind) and not any(before[:1] + behind[-1:])))


def _read_by_attention(part: Part) -> bool:
    """Whether a module's settings are attention's own, or those of rotary embeddings."""
    module = part.module
    return (hasattr(module, "is_causal") and hasattr(module, "config")) or len(part.steady) > len(part.buffers)


def facts_of(trunk: nn.Module) -> dict[str, Any]:
    """Settings of attention, the numbers of passing buffers and the kinds of what holds no weights, by name.

    A layer is named by its own number: the second stage of a pipeline holds layer 7, say, as its first.
    """
    facts: dict[str, Any] = {}
    inside, numbers = [*parts(trunk)], {}
    for part in inside:
        place, number = PLACE.match(part.prefix), getattr(part.module, "layer_idx", None)
        if place is not None and number is not None:
            numbers[place[0]] = str(number)

    def named(prefix: str) -> str:
        place = PLACE.match(prefix)
        number = None if place is None else numbers.get(place[0])
        return prefix if number is None else re.sub(r"\d+", number, prefix, count=1)

    for part in filter(_read_by_attention, inside):
        prefix = named(part.prefix)
        facts |= {prefix + name: value for name, value in computes_by(part.module).items()}
        for name in part.steady.keys() - part.buffers.keys():
            facts[f"{prefix}{name} {[*part.steady[name].shape]}"] = tensor_hash(part.steady[name])[:16]
    for part in inside:  # no weight tells an activation from another one
        module = part.module
        if not (module._parameters or module._buffers or module._modules):
            facts[named(part.prefix).rstrip(".")] = "Identity()" if isinstance(module, nn.Dropout) else repr(module)
    return facts
