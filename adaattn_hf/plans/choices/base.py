"""A choice: what a head computes instead of exact attention, made of parts with at most one of each aspect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from ...attention.call import AttentionCall, AttentionResult
from ...backends import select
from ...errors import unknown
from ..record import PlanError, checked_keys
from ..tensors import LayerTensors
from .part import Colour, Keys, Operands, Part, all_keys, all_operands

_FORMAT_1 = {"kind": "exact", "window": 0, "sinks": 0, "rank": 0, "precision": "model"}
"""The exact choice in plan format 1; further fields of other choices are written beside these keys."""


@dataclass(frozen=True)
class Choice:
    """What a key/value head and the query heads that share it compute: keys read, then changes of operands in order."""

    keys: Keys | None = None
    operands: tuple[Operands, ...] = ()

    @classmethod
    def of(cls, *parts: Part) -> Choice:
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

    def head_rule(self, few: bool) -> dict[str, Any] | None:
        """Returns the choice as rules per head (`HeadRules`), None if they cannot express it; see `Part.head_rule`."""
        rules: dict[str, Any] = {}
        for part in self.parts:
            rule = part.head_rule(few)
            if rule is None:
                return None
            rules.update(rule)
        return rules

    def rows_with_fewer_keys(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        """How many rows at positions from `first` to `stop` see (or may see) fewer keys than exact attention."""
        return 0 if self.keys is None else self.keys.rows_with_fewer_keys(first, stop, kv_len, causal)

    def changed_rows(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        """Returns how many of these rows are not computed exactly."""
        if self.operands:
            return max(stop - first, 0)
        return self.rows_with_fewer_keys(first, stop, kv_len, causal)

    @property
    def span(self) -> tuple[int, int] | None:
        """Window and sinks beyond which a causal head reads no key, None where it may read any."""
        rule = self.head_rule(few=True) or {}
        return (rule["window"], rule["sinks"]) if rule.get("window") else None

    def beside_window(self, window: int | None) -> Choice:
        """Returns the choice for layers with a window of their own, without keys parts that change nothing there."""
        if window is None or self.keys is None or not self.keys.idle_beside(window):
            return self
        return Choice(None, self.operands)

    def for_quantised_cache(self) -> Choice | None:
        """Returns the choice for a quantised cache, None if a part of it needs unquantised keys."""
        if any(part.for_quantised_cache == "refused" for part in self.parts):
            return None
        return Choice.of(*(part for part in self.parts if part.for_quantised_cache == "kept"))

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
    def from_dict(cls, data: Any) -> Choice:
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
