"""A snapshot of a model's weights, by which the door of a planned model notices that they changed."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn

from .parts import offloaded, parts, pieces, resident

_version, _pointer = attrgetter("_version"), torch.Tensor.data_ptr
_values: Any = dict.values
_get: Any = dict.get


class Weights(NamedTuple):
    """A snapshot of a model's weights, compared in every pass to notice changes after the check.

    Those are its own weights: parameters and buffers inside wrappers, not what adapters add and training changes.

    Attributes:
        tensors, pointers: Its weights, and the memory address of each.
        counted, versions: Those that count changes in place (tensors of `torch.inference_mode` do not), and counters.
        holders, lengths: The dictionaries of parameters and children of all submodules and wrappers, and their sizes.
        held: All the values of these, one dictionary after the other.
        rooms, names, buffers: The dictionary of each buffer, in which others may come and go, its name there, and it.
        order: Its weights in the order of the model, and whether each belongs to one of its layers.
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
    order: tuple[tuple[torch.Tensor, bool], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Weights:
        """Takes a snapshot of a model's weights, and of all buffers that no pass changes."""
        inside = [*parts(module)]
        owners = [part.module._parameters for part in inside if resident(part.module)]
        holders: list[dict[str, Any]] = [*filter(None, owners)]
        for part in inside:
            holders += [held for one in (part.module, *part.wrappers) if (held := one._modules)]
        saved = [(part.module._buffers, name, held) for part in inside for name, held in part.steady.items()]
        rooms, names, buffers = zip(*saved, strict=True) if saved else ((), (), ())
        away = [weight for part in inside for weight in offloaded(part.module)]
        parameters = chain(chain.from_iterable(owner.values() for owner in owners), away)
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
            tuple((weight, part.listed) for part in inside for weight in part.weights.values()),
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

    def covers(self, later: Weights) -> bool:
        """Whether the weights of a later snapshot are these: all, in other containers, or a pipeline's stage of them.

        A stage keeps one run of them in their order. At each end where it lacks layers, it lacks what stands between
        them and that end, too (embeddings, a last norm): a model that only lost layers is no stage.
        """
        start = next((at for at, one in enumerate(self.order) if later.order and one[0] is later.order[0][0]), 0)
        end = start + len(later.order)
        same = all(one[0] is other[0] for one, other in zip(self.order[start:end], later.order, strict=False))
        lost = [listed for _, listed in (*self.order[:start], *self.order[end:])]
        ends = [listed for _, listed in (*self.order[:start][:1], *self.order[end:][-1:])]
        return self.unwritten() and end <= len(self.order) and same and (not lost or (any(lost) and not any(ends)))
