"""A snapshot of a module's weights, by which every planned call notices that they changed."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn

_version, _pointer = attrgetter("_version"), torch.Tensor.data_ptr
_values: Any = dict.values


class Weights(NamedTuple):
    """A snapshot of a module's weights, compared in every call to notice changes after the check.

    Attributes:
        parameters: Its parameters.
        versions: Version counter of each, which counts changes in place.
        pointers: Memory address of each.
        holders: The dictionaries of parameters and children of all submodules.
        lengths: Values of each dictionary.
        held: All these values, one dictionary after the other.
    """

    parameters: tuple[torch.Tensor, ...]
    versions: list[int]
    pointers: list[int]
    holders: tuple[dict[str, Any], ...]
    lengths: list[int]
    held: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Weights:
        """Takes a snapshot of a module's weights."""
        parameters = tuple(module.parameters())
        holders = tuple(
            held for part in module.modules() for held in (part._parameters, part._modules) if held
        )
        return cls(
            parameters,
            [*map(_version, parameters)],
            [*map(_pointer, parameters)],
            holders,
            [*map(len, holders)],
            tuple(chain.from_iterable(map(_values, holders))),
        )

    def same(self) -> bool:
        """Whether nothing has changed: no weight was modified in place, replaced, cast or wrapped.

        Every planned layer of every pass asks: it is all done by iterators, without a step of the interpreter for each
        weight.
        """
        return (
            [*map(_version, self.parameters)] == self.versions
            and [*map(_pointer, self.parameters)] == self.pointers
            and [*map(len, self.holders)] == self.lengths
            and all(map(is_, chain.from_iterable(map(_values, self.holders)), self.held))
        )
