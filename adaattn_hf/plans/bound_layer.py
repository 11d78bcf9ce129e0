"""A layer's plan joined with its calibrated tensors, ready to run."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

from torch import Tensor

from ..attention.heads import HeadRules
from ..attention.structure import MaskStructure
from .choices import MIN_PREFILL_ROWS, Choice
from .choices.part import is_decode
from .plan import LayerPlan
from .tensors import LayerTensors


class LayerLaunch(NamedTuple):
    """The calls that compute a layer's choices, as few as possible: one for `heads`, and the `separate` ones.

    Attributes:
        heads: Key/value heads that share a call.
        rules: Those of these heads, None if all are exact.
        ending: The same rules, which end with the plan's lengths.
        separate: Choices that need a call of their own, with their heads; where there are none, `heads` are all.
    """

    heads: tuple[int, ...]
    rules: HeadRules | None
    ending: HeadRules | None
    separate: tuple[tuple[Choice, tuple[int, ...]], ...]


BOUND_LAYERS: WeakValueDictionary[int, "BoundLayer"] = WeakValueDictionary()
"""The bound layers of this process by handle."""


@dataclass(eq=False)
class BoundLayer:
    """A layer's plan with its tensors, ready to run; all that follows from it is worked out when it is made.

    Attributes:
        plan: The choices.
        tensors: Bases and means.
        max_length: Rows at this position of their sequence or later are exact; bidirectional, all rows of a
            longer sequence.
        local_heads: Key/value heads of this process under tensor parallelism; empty without it.
        exact_steps: Whether decode steps, sequences of fewer than `MIN_PREFILL_ROWS` query rows, are exact.
        dtype: Name of the dtype that it was verified in.
        owner: A weak reference to what bound the plan to a model, None where no model runs by it. Copies have none, as
            a copied layer is part of no model that was checked.
        handle: Number by which traced graphs refer to the layer.
        heads_by_choice: The choices with the key/value heads that take each, in order of first appearance.
        decode, prefill: The calls for sequences with fewer than `MIN_PREFILL_ROWS` query rows, and for all others.
        counts_rows: Whether it depends on the query rows of a sequence what is computed.
        has_gradient: Whether gradients flow through every choice.
    """

    plan: LayerPlan
    tensors: LayerTensors
    max_length: int
    local_heads: range = range(0)
    exact_steps: bool = False
    dtype: str = ""
    owner: Any = field(default=None, repr=False)
    handle: int = field(default_factory=itertools.count().__next__, init=False, repr=False)
    heads_by_choice: tuple[tuple[Choice, tuple[int, ...]], ...] = field(init=False, repr=False)
    decode: LayerLaunch = field(init=False, repr=False)
    prefill: LayerLaunch = field(init=False, repr=False)
    counts_rows: bool = field(init=False, repr=False)
    has_gradient: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Work out its variants, and register it for traced graphs."""
        choices, groups = self.plan.choices, dict[Choice, list[int]]()
        for head, choice in enumerate(choices):
            groups.setdefault(choice, []).append(head)
        self.heads_by_choice = tuple((choice, tuple(heads)) for choice, heads in groups.items())
        self.decode, self.prefill = self._launch(True), self._launch(False)
        self.counts_rows = self.exact_steps or any(choice.operands for choice in groups)
        self.has_gradient = all(choice.has_gradient for choice in groups)
        split = self.local_heads and len(self.local_heads) != len(choices)
        self._part = (
            self.with_choices((choices[head] for head in self.local_heads), self.local_heads) if split else None
        )
        over_codes = [choice for choice in map(Choice.for_quantised_cache, choices) if choice is not None]
        changes = len(over_codes) == len(choices) and over_codes != [*choices]
        self._over_codes = self.with_choices(over_codes) if changes else None
        self._some: dict[tuple[tuple[int, ...], bool], BoundLayer] = {}
        BOUND_LAYERS[self.handle] = self

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Copies and pickles a layer without its handle and owner."""
        return type(self), (self.plan, self.tensors, self.max_length, self.local_heads, self.exact_steps, self.dtype)

    def of_call(self, kv_heads: int, q_len: int) -> "BoundLayer | None":
        """Returns the layer for a call with so many key/value heads: this process's part under tensor parallelism.

        None for so few query rows that they are a decode step which the plan leaves exact. A plan for another number
        of heads is a ValueError.
        """
        layer = self._part if self._part is not None and kv_heads == len(self.local_heads) else self
        if kv_heads != len(layer.plan.choices):
            raise ValueError(
                f"plan of layer {self.plan.layer}: made for {len(layer.plan.choices)} key/value heads, got "
                f"keys with {kv_heads}; calibrate the model in the form in which it runs. Sequence parallelism by "
                "heads (Ulysses) does not say which heads a process has: split the model by tp_plan, or call "
                "adaattn_hf.remove_plan(model)"
            )
        return None if self.exact_steps and q_len < MIN_PREFILL_ROWS else layer

    def with_choices(self, choices: Iterable[Choice], heads: Sequence[int] | None = None) -> Self:
        """Returns the layer with other choices, which are those of some key/value heads where `heads` names them."""
        tensors = self.tensors if heads is None else self.tensors.of_heads(heads)
        return replace(self, plan=replace(self.plan, choices=tuple(choices)), tensors=tensors)

    @property
    def for_quantised_cache(self) -> "BoundLayer":
        """The layer for a quantised cache: windows stay, precisions are dropped, since operands are rounded already.

        A choice that needs unquantised keys is a ValueError.
        """
        if self._over_codes is not None:
            return self._over_codes
        lost = [choice.label for choice, _ in self.heads_by_choice if choice.for_quantised_cache() is None]
        if lost:
            raise ValueError(
                f"plan of layer {self.plan.layer}: {', '.join(lost)} looks at the keys themselves, and the cache "
                'stores them quantised; use a cache of numbers (cache="model") or calibrate with --families window'
            )
        return self

    def of_heads(self, heads: tuple[int, ...], all_keys: bool = False) -> "BoundLayer":
        """Returns the layer with some key/value heads; with `all_keys` they read all keys that they are given."""
        part = self._some.get((heads, all_keys))
        if part is None:
            choices = [self.plan.choices[head] for head in heads]
            if all_keys:
                choices = [Choice(None, choice.operands) for choice in choices]
            part = self._some[heads, all_keys] = self.with_choices(choices, heads)
        return part

    def changed_rows(self, first: int, stop: int, kv_len: int, causal: bool) -> tuple[int, int]:
        """Rows at positions from `first` to `stop` that heads do not compute exactly, and that see fewer keys.

        They are counted once for each key/value head; those beyond the plan's lengths are exact.
        """
        if causal:
            stop = min(stop, self.max_length)
        elif kv_len > self.max_length:
            stop = first
        span = (first, stop, kv_len, causal)
        choices = self.plan.choices
        return sum(one.changed_rows(*span) for one in choices), sum(one.rows_with_fewer_keys(*span) for one in choices)

    def speaks_for(self, structure: MaskStructure) -> tuple[bool | Tensor, bool | None]:
        """Whether sequences have few query rows (by row where they differ), and whether it speaks for all rows or none.

        None where that differs by row, or only data tell.
        """
        decode = is_decode(structure) if self.counts_rows else structure.q_len < MIN_PREFILL_ROWS
        return decode, False if self.exact_steps and decode is True else structure.within(self.max_length)

    @property
    def trains(self) -> bool:
        """Whether it goes on while its model is trained: a window does, means and bases belong to weights."""
        tensors = self.tensors
        return self.has_gradient and tensors.key_mean is None and not tensors.query_basis and not tensors.key_basis

    def _launch(self, decode: bool) -> LayerLaunch:
        by_choice = {choice: choice.head_rule(decode) for choice, _ in self.heads_by_choice}
        rules = {head: rule for head, choice in enumerate(self.plan.choices) if (rule := by_choice[choice]) is not None}
        separate = tuple((choice, heads) for choice, heads in self.heads_by_choice if by_choice[choice] is None)
        heads, together = tuple(rules), None
        if any(rules.values()):
            mean = self.tensors.key_mean if any(rule.get("precision") == "int8" for rule in rules.values()) else None
            together = head_rules([*rules.values()], None if mean is None else mean[[*heads]])
        ending = None if together is None else replace(together, until=self.max_length)
        return LayerLaunch(heads, together, ending, separate)


def head_rules(rules: Sequence[Mapping[str, Any]], key_mean: Tensor | None = None) -> HeadRules:
    """Returns what `Choice.head_rule` says of each head as the rules of one call."""
    return HeadRules(
        tuple(rule.get("window", 0) for rule in rules),
        tuple(rule.get("sinks", 0) for rule in rules),
        tuple(rule.get("precision", "model") for rule in rules),
        key_mean=key_mean,
    )
