"""A snapshot of a module's weights, by which every planned call notices that they changed."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn

from .parts import parts, pieces

_version, _pointer = attrgetter("_version"), torch.Tensor.data_ptr
_values: Any = dict.values
_get: Any = dict.get


class Weights(NamedTuple):
    """A snapshot of a module's weights, compared in every call to notice changes after the check.

    Those are its own weights: parameters and saved buffers inside wrappers, not what adapters add and training changes.

    Attributes:
        tensors: Its weights.
        counted: Those that count changes in place; tensors of `torch.inference_mode` do not.
        versions: Version counter of each of them.
        pointers: Memory address of each weight.
        holders: The dictionaries of parameters and children of all submodules and wrappers.
        lengths: Values of each dictionary.
        held: All these values, one dictionary after the other.
        rooms: The dictionary of each saved buffer; others in it may come and go.
        names: Its name there.
        buffers: The buffers.
    """

    tensors: tuple[torch.Tensor, ...]
    counted: tuple[torch.Tensor, ...]
    versions: list[int]
    pointers: list[int]
    holders: tuple[dict[str, Any], ...]
    lengths: list[int]
    held: tuple[Any, ...]
    rooms: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    buffers: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Weights:
        """Takes a snapshot of a module's weights."""
        inside = [*parts(module)]
        holders: list[dict[str, Any]] = []
        for part in inside:
            of_part: tuple[dict[str, Any], ...] = (part.module._parameters, part.module._modules)
            holders += [held for held in (*of_part, *(outer._modules for outer in part.wrappers)) if held]
        saved = [(part.module._buffers, name, buffer) for part in inside for name, buffer in part.buffers.items()]
        rooms, names, buffers = zip(*saved, strict=True) if saved else ((), (), ())
        parameters = chain.from_iterable(part.module._parameters.values() for part in inside)
        weights = chain((weight for weight in parameters if weight is not None), buffers)
        tensors = tuple(piece for weight in weights for piece in pieces(weight))
        counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
        return cls(
            tensors,
            counted,
            [*map(_version, counted)],
            [*map(_pointer, tensors)],
            tuple(holders),
            [*map(len, holders)],
            tuple(chain.from_iterable(map(_values, holders))),
            rooms,
            names,
            buffers,
        )

    def same(self) -> bool:
        """Whether nothing has changed: no weight was modified in place, replaced, cast or wrapped.

        Every planned layer of every pass asks: it is all done by iterators, without a step of the interpreter for each
        weight.
        """
        return (
            [*map(_version, self.counted)] == self.versions
            and [*map(_pointer, self.tensors)] == self.pointers
            and [*map(len, self.holders)] == self.lengths
            and all(map(is_, chain.from_iterable(map(_values, self.holders)), self.held))
            and (not self.buffers or all(map(is_, map(_get, self.rooms, self.names), self.buffers)))
        )
