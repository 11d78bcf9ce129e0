"""The base classes of parts of a choice: a window, a rank, a precision.

A part defines what it means (which execution is tested against), how it runs, which rows it changes, which candidates
there are, and how it is stored and shown. Calibration, execution, monitor and picture use these methods; nothing
outside this directory branches on the kind of a part. A new kind is one file with one class, registered by
`register`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from ...attention.call import AttentionCall
from ...attention.runs import own_rows
from ...attention.structure import MaskStructure
from ..tensors import LayerTensors

Colour = tuple[int, int, int]

MIN_PREFILL_ROWS = 16
"""Sequences of fewer query rows than this are computed in the model's precision: a decode step reads the cache once,
and rounding it anew would cost more than it saves. It is never less exact."""


def is_decode(structure: MaskStructure) -> bool | Tensor:
    """Whether sequences of a call have fewer than `MIN_PREFILL_ROWS` query rows; `[batch or 1, q_len]` where some do.

    Each sequence counts its own: what else is in the call must not decide how it is rounded.
    """
    if structure.q_len < MIN_PREFILL_ROWS or (structure.key_padding is None and structure.k_segments is None):
        return structure.q_len < MIN_PREFILL_ROWS
    return structure.cached(_few_rows)


def _few_rows(structure: MaskStructure) -> bool | Tensor:
    rows = own_rows(structure)
    few = rows < MIN_PREFILL_ROWS
    kinds = few[rows > 0].unique().tolist()  # where no query is real, none has to be computed
    return few if len(kinds) == 2 else kinds == [True]


@dataclass(frozen=True)
class Setting:
    """What candidates depend on: the longest sequence, the smallest head size, what to save (`memory`, not time)."""

    length: int
    head_dim: int
    dtype: str
    families: tuple[str, ...]
    windows: tuple[int, ...]
    causal: bool = True
    memory: bool = False


class Part(ABC):
    """One change that a choice makes; subclasses are frozen dataclasses whose fields are its parameters.

    Attributes:
        name: `kind` in a plan's JSON (of keys), or the name of its field there (of operands).
        aspect: What it saves: `sparsity`, `rank` or `precision`; a choice has at most one part of an aspect.
        families: Names by which users ask for its candidates.
        by_default: Whether its families are considered when none are named.
        on_cuda: Whether they are so on a GPU, too.
        for_quantised_cache: What happens to it over a quantised cache: `kept`, `dropped` (operands are rounded
            already), or `refused` if it needs unquantised keys.
    """

    name: ClassVar[str]
    aspect: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    by_default: ClassVar[bool] = False
    on_cuda: ClassVar[bool] = True
    for_quantised_cache: ClassVar[str] = "refused"

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name, for tables."""

    @property
    @abstractmethod
    def meaning(self) -> str:
        """The label in words, for legends."""

    @abstractmethod
    def tinted(self, colour: Colour) -> Colour:
        """Returns the colour of a head with this part, from the colour without it."""

    def head_rule(self, few: bool) -> Mapping[str, Any] | None:
        """Returns the part as a rule of `HeadRules`: any of `window`, `sinks`, `precision`.

        Args:
            few: Whether sequences have fewer than `MIN_PREFILL_ROWS` query rows in the call.

        Returns:
            None if `HeadRules` cannot express it; such heads get a call of their own.
        """
        return None

    def tensors(self, layer: LayerTensors, head: int) -> Mapping[str, Tensor]:
        """The calibrated tensors that a head reads, by their names in the plan's file."""
        return {}

    def misfit(self, layer: LayerTensors, head: int, kv_heads: int, head_dim: int | None) -> str | None:
        """Returns what is wrong with a head's calibrated tensors, None if they fit the layer."""
        return None

    @classmethod
    @abstractmethod
    def candidates(cls, setting: Setting) -> Sequence[Part]:
        """Returns the parts to consider in a setting, in the order in which tables show them."""


class Keys(Part):
    """A part that says which keys a row reads. Its fields are written beside `kind` in a plan's JSON."""

    aspect = "sparsity"

    @abstractmethod
    def structure(self, call: AttentionCall) -> MaskStructure:
        """The definition: the structure of the call with the keys that are left. May build a dense mask."""

    @abstractmethod
    def rows_with_fewer_keys(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        """How many rows at positions from `first` to `stop` see (or may see) fewer keys than exact attention."""

    def idle_beside(self, window: int) -> bool:
        """Whether the part changes nothing in layers that have such a window of their own."""
        return False


class Operands(Part):
    """A part that changes queries, keys or values. Its one field is written under its name in a plan's JSON.

    Attributes:
        blank: What is written where a choice has no such part.
        order: Place among the operands' changes; a projection comes before rounding.
        crosses: Whether candidates combine it with the parts of other aspects.
    """

    blank: ClassVar[Any]
    order: ClassVar[int] = 0
    crosses: ClassVar[bool] = True

    @abstractmethod
    def defined(self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors) -> AttentionCall:
        """The definition: the call of these key/value heads with other operands in their own dtype."""

    def running(self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors) -> AttentionCall:
        """The same as it runs, in the dtype that it is computed in."""
        return self.defined(call, heads, layer)

    def left(self, layer: LayerTensors) -> LayerTensors:
        """The calibrated tensors that still fit the operands behind this part."""
        return layer

    @property
    def columns(self) -> int:
        """Columns of the score bases that it needs."""
        return 0

    @property
    def has_gradient(self) -> bool:
        """Whether gradients flow through it."""
        return True


KINDS: dict[str, type[Part]] = {}
"""Every kind of part by its name."""

Registered = TypeVar("Registered", bound=type[Part])


def register(kind: Registered) -> Registered:
    """Registers a kind of part for plans, candidates and pictures."""
    KINDS[kind.name] = kind
    return kind


def all_keys() -> list[type[Keys]]:
    """Returns every kind of part that selects keys, in order of registration."""
    return [kind for kind in KINDS.values() if issubclass(kind, Keys)]


def all_operands() -> list[type[Operands]]:
    """Returns every kind of part that changes operands, in the order in which they are applied."""
    kinds = [kind for kind in KINDS.values() if issubclass(kind, Operands)]
    return sorted(kinds, key=lambda kind: kind.order)
