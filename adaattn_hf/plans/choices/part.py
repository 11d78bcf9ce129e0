"""A choice, which a head computes instead of exact attention, and the base classes of its parts (a window, a rank …).

A part defines what it means (which execution is tested against), how it runs, which rows it changes, which candidates
there are, and how it is stored and shown. Calibration, execution, monitor and picture use these methods; nothing
outside this directory branches on the kind of a part. A new kind is one file with one class, registered by
`register`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult
from ...attention.runs import query_counts
from ...attention.structure import MaskStructure
from ...backends import select
from ...errors import unknown
from ..record import PlanError, checked_keys
from ..tensors import LayerTensors

Colour = tuple[int, int, int]

MIN_PREFILL_ROWS = 16
"""Sequences of fewer query rows than this are computed in the model's precision: a decode step reads the cache once,
and rounding it anew would cost more than it saves. It is never less exact."""

_FORMAT_1 = {"kind": "exact", "window": 0, "sinks": 0, "rank": 0, "precision": "model"}
"""The exact choice in plan format 1; further fields of other choices are written beside these keys."""


def is_decode(structure: MaskStructure) -> bool | Tensor:
    """Whether sequences of a call have fewer than `MIN_PREFILL_ROWS` query rows; `[batch or 1, q_len]` where some do.

    Each sequence counts its own: what else is in the call must not decide how it is rounded.
    """
    if structure.q_len < MIN_PREFILL_ROWS or (structure.key_padding is None and structure.k_segments is None):
        return structure.q_len < MIN_PREFILL_ROWS
    return structure.cached(_is_decode_by_row)


def _is_decode_by_row(structure: MaskStructure) -> bool | Tensor:
    rows = query_counts(structure)
    decode = rows < MIN_PREFILL_ROWS
    kinds = decode[rows > 0].unique().tolist()  # where no query is real, none has to be computed
    return decode if len(kinds) == 2 else kinds == [True]


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

    def head_rule(self, decode: bool) -> Mapping[str, Any] | None:
        """Returns the part as a rule of `HeadRules`: any of `window`, `sinks`, `precision`.

        None if `HeadRules` cannot express it; such heads get a call of their own. `decode`: sequences have fewer than
        `MIN_PREFILL_ROWS` query rows in the call.
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
    def candidates(cls, setting: Setting) -> Sequence[Self]:
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
    return sorted((kind for kind in KINDS.values() if issubclass(kind, Operands)), key=lambda kind: kind.order)


@dataclass(frozen=True)
class Choice:
    """What a key/value head and the query heads that share it compute: keys read, then changes of operands in order."""

    keys: Keys | None = None
    operands: tuple[Operands, ...] = ()

    @classmethod
    def of(cls, *parts: Part) -> Self:
        """Returns the choice of these parts. Raises PlanError if two are of one aspect."""
        aspects = [part.aspect for part in parts]
        if len(set(aspects)) < len(aspects):
            raise PlanError(f"choice: got parts {[part.label for part in parts]}, expected at most one of each aspect")
        operands = [part for part in parts if isinstance(part, Operands)]
        keys = next((part for part in parts if isinstance(part, Keys)), None)
        return cls(keys, tuple(sorted(operands, key=lambda part: part.order)))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """All parts."""
        return self.operands if self.keys is None else (self.keys, *self.operands)

    @property
    def is_exact(self) -> bool:
        """Whether the choice computes the stock function in the model's dtype."""
        return not self.parts

    @property
    def kind(self) -> str:
        """Name of the part that drops keys, `exact` if none does."""
        return "exact" if self.keys is None else self.keys.name

    @cached_property
    def label(self) -> str:
        """A short name, for tables and prices: `exact`, `w1024+16 bf16`, `r32`."""
        return " ".join(part.label for part in self.parts) or "exact"

    @property
    def colour(self) -> Colour:
        """The colour of a head that takes the choice: grey exact, each part tints it."""
        colour: Colour = (70, 70, 70)
        for part in self.parts:
            colour = part.tinted(colour)
        return colour

    @property
    def columns(self) -> int:
        """Columns of the score bases that it needs."""
        return max((part.columns for part in self.operands), default=0)

    @property
    def has_gradient(self) -> bool:
        """Whether gradients flow through all parts."""
        return all(part.has_gradient for part in self.operands)

    def head_rule(self, decode: bool) -> dict[str, Any] | None:
        """Returns the choice as rules per head (`HeadRules`), None if they cannot express it; see `Part.head_rule`."""
        rules: dict[str, Any] = {}
        for part in self.parts:
            rule = part.head_rule(decode)
            if rule is None:
                return None
            rules.update(rule)
        return rules

    def rows_with_fewer_keys(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        """How many rows at positions from `first` to `stop` see (or may see) fewer keys than exact attention."""
        return 0 if self.keys is None else self.keys.rows_with_fewer_keys(first, stop, kv_len, causal)

    def changed_rows(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        """Returns how many of these rows are not computed exactly."""
        return max(stop - first, 0) if self.operands else self.rows_with_fewer_keys(first, stop, kv_len, causal)

    @property
    def span(self) -> tuple[int, int] | None:
        """Window and sinks beyond which a causal head reads no key, None where it may read any."""
        rule = self.head_rule(decode=True) or {}
        return (rule["window"], rule["sinks"]) if rule.get("window") else None

    def beside_window(self, window: int | None) -> Self:
        """Returns the choice for layers with a window of their own, without keys parts that change nothing there."""
        if window is None or self.keys is None or not self.keys.idle_beside(window):
            return self
        return replace(self, keys=None)

    def for_quantised_cache(self) -> Self | None:
        """Returns the choice for a quantised cache, None if a part of it needs unquantised keys."""
        if any(part.for_quantised_cache == "refused" for part in self.parts):
            return None
        return self.of(*(part for part in self.parts if part.for_quantised_cache == "kept"))

    # ------------------------------------------------------------------ what it computes
    def running(self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors) -> AttentionCall:
        """Returns the call of these key/value heads with the operands as they are computed."""
        for part in self.operands:
            call, layer = part.running(call, heads, layer), part.left(layer)
        return call

    def defined(self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors) -> AttentionCall:
        """Returns the call whose exact attention is what the choice computes for these key/value heads.

        It may hold a dense mask, and serves tests, `output_attentions` and calibration. The call is of these heads
        alone (`attention.heads.some_heads`); `heads` are their indices in `layer`.
        """
        changed = call
        for part in self.operands:
            changed, layer = part.defined(changed, heads, layer), part.left(layer)
        return changed if self.keys is None else replace(changed, structure=self.keys.structure(call))

    def attend(
        self, call: AttentionCall, heads: Sequence[int], layer: LayerTensors, backend: str | None
    ) -> AttentionResult:
        """What the choice computes for these key/value heads, in the query's dtype, by a call of its own."""
        changed = self.running(call, heads, layer)
        if self.keys is not None:  # selected by the call as it came, not by projected or rounded operands
            changed = replace(changed, structure=self.keys.structure(call))
        result = select.attend(changed, backend)
        return AttentionResult(result.out.to(call.query.dtype), result.lse)

    # ------------------------------------------------------------------ as data
    def to_dict(self) -> dict[str, Any]:
        """Returns the choice as JSON data of format 1."""
        data = dict(_FORMAT_1)
        if self.keys is not None:
            data.update(kind=self.keys.name, **asdict(self.keys))  # type: ignore[call-overload]
        for part in self.operands:
            data[part.name] = next(iter(asdict(part).values()))  # type: ignore[call-overload]
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Returns the choice written by `to_dict`; PlanError for an unknown kind or key, or a value out of range."""
        if not isinstance(data, Mapping):
            raise PlanError(f"got {type(data).__name__}, expected a mapping of Choice fields")
        kinds: dict[str, Any] = {"exact": None, **{kind.name: kind for kind in all_keys()}}
        name = data.get("kind", "exact")
        if not isinstance(name, str) or name not in kinds:
            raise PlanError(unknown("kind", str(name), kinds))
        names = [] if kinds[name] is None else [field.name for field in fields(kinds[name])]
        operands = all_operands()
        blank = {**_FORMAT_1, **{kind.name: kind.blank for kind in operands}}
        values = {**blank, **checked_keys({*blank, *names}, data, blank.keys() - _FORMAT_1.keys() - {*names})}
        for key in {"window", "sinks"} - set(names):
            if values[key] != blank[key] or isinstance(values[key], bool):
                raise PlanError(f"{key} is {values[key]!r} with kind {name!r}, which has none; expected {blank[key]!r}")
        keys = None if kinds[name] is None else kinds[name](**{key: values[key] for key in names})
        chosen = tuple(
            kind(values[kind.name])  # type: ignore[call-arg]
            for kind in operands
            if values[kind.name] != kind.blank or type(values[kind.name]) is not type(kind.blank)
        )
        return cls(keys, chosen)


EXACT = Choice()
