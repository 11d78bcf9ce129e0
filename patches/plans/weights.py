"""A snapshot of a module's weights, by which every planned pass notices that they changed."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn

from .parts import parts, pieces, resident

_version, _pointer = attrgetter("_version"), torch.Tensor.data_ptr
_values: Any = dict.values
_get: Any = dict.get


class Weights(NamedTuple):
    """A snapshot of a module's weights, compared in every pass to notice changes after the check.

    Those are its own weights: parameters and saved buffers inside wrappers, not what adapters add and training changes.

    Attributes:
        tensors, pointers: Its weights, and the memory address of each.
        counted, versions: Those that count changes in place (tensors of `torch.inference_mode` do not), and counters.
        holders, lengths: The dictionaries of parameters and children of all submodules and wrappers, and their sizes.
        held: All the values of these, one dictionary after the other.
        rooms, names, buffers: The dictionary of each buffer, in which others may come and go, its name there, and it.
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
    def of(cls, module: nn.Module, whole: bool = False) -> Weights:
        """Takes a snapshot of a module's weights; `whole`, of what lies between passes, with all buffers."""
        inside = [*parts(module)]
        owners = [part.module._parameters for part in inside if not whole or resident(part.module)]
        holders: list[dict[str, Any]] = [*filter(None, owners)]
        for part in inside:
            holders += [held for one in (part.module, *part.wrappers) if (held := one._modules)]
        kept = [(part.module._buffers, part.steady if whole else part.buffers) for part in inside]
        saved = [(room, name, buffer) for room, held in kept for name, buffer in held.items()]
        rooms, names, buffers = zip(*saved, strict=True) if saved else ((), (), ())
        parameters = chain.from_iterable(owner.values() for owner in owners)
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

    def unwritten(self) -> bool:
        """Whether the weights hold what they held, wherever they are now."""
        return [*map(_version, self.counted)] == self.versions and [*map(_pointer, self.tensors)] == self.pointers

    def same(self) -> bool:
        """Whether nothing has changed: no weight was modified in place, replaced, cast or wrapped.

        Every pass asks: it is all done by iterators, without a step of the interpreter for each weight.
        """
        return (
            self.unwritten()
            and [*map(len, self.holders)] == self.lengths
            and all(map(is_, chain.from_iterable(map(_values, self.holders)), self.held))
            and (not self.buffers or all(map(is_, map(_get, self.rooms, self.names), self.buffers)))
        )
