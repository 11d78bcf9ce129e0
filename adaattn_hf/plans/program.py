"""A layer's plan joined with its calibrated tensors, ready to run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from ..attention.heads import HeadRules
from .choices import EXACT, PRECISE_ROWS, Choice
from .plan import LayerPlan
from .tensors import LayerTensors


@dataclass(frozen=True, eq=False)
class Requests:
    """The requests that compute a layer's choices, as few as possible; `apart` need one of their own, with their heads.

    `rules` are those per head of `heads`, None if all are exact; `ending` the same, which end with the plan's lengths.
    """

    heads: tuple[int, ...]
    rules: HeadRules | None
    ending: HeadRules | None
    apart: tuple[tuple[Choice, tuple[int, ...]], ...]


PROGRAMS: WeakValueDictionary[int, Program] = WeakValueDictionary()
"""The programs of this process by handle."""


@dataclass(frozen=True, eq=False)
class Program:
    """A layer's plan with its tensors, ready to run.

    Attributes:
        plan: The choices.
        tensors: Bases and means.
        max_length: Rows at this position of their sequence or later are exact; bidirectional, all rows of a
            longer sequence.
        own: Key/value heads of this process under tensor parallelism; empty without it.
        exact_steps: Whether decode steps, sequences of fewer than `PRECISE_ROWS` query rows, are exact.
        dtype: Name of the dtype that it was proven in.
        handle: Number by which traced graphs refer to the program.
    """

    plan: LayerPlan
    tensors: LayerTensors
    max_length: int
    own: range = range(0)
    exact_steps: bool = False
    dtype: str = ""
    handle: int = field(default_factory=itertools.count().__next__, init=False, repr=False)
    _parts: dict[tuple[tuple[int, ...], bool], Program] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Register the program for traced graphs."""
        PROGRAMS[self.handle] = self

    def __reduce__(self) -> tuple[type[Program], tuple[object, ...]]:
        """Copies and pickles a program without its handle: each copy is registered under one of its own."""
        return Program, (self.plan, self.tensors, self.max_length, self.own, self.exact_steps, self.dtype)

    @cached_property
    def launches(self) -> tuple[tuple[Choice, tuple[int, ...]], ...]:
        """The choices of the layer with the key/value heads that take each, in order of first appearance."""
        groups: dict[Choice, list[int]] = {}
        for head, choice in enumerate(self.plan.choices):
            groups.setdefault(choice, []).append(head)
        return tuple((choice, tuple(heads)) for choice, heads in groups.items())

    def of_call(self, kv_heads: int) -> Program:
        """Returns the program for a call with so many key/value heads: this process's part under tensor parallelism."""
        return self._part if kv_heads == len(self.own) != len(self.plan.choices) else self

    @cached_property
    def _part(self) -> Program:
        return self.with_choices((self.plan.choices[head] for head in self.own), self.own)

    def with_choices(self, choices: Iterable[Choice], heads: Sequence[int] | None = None) -> Program:
        """Returns the program with other choices, which are those of some key/value heads where `heads` names them."""
        tensors = self.tensors if heads is None else self.tensors.of_heads(heads)
        return replace(self, plan=replace(self.plan, choices=tuple(choices)), tensors=tensors)

    @cached_property
    def over_stored(self) -> Program:
        """The program for a quantised cache: windows stay, precisions are dropped, since operands are rounded already.

        A choice that needs unquantised keys is a ValueError.
        """
        lost = [choice.label for choice, _ in self.launches if choice.over_stored() is None]
        if lost:
            raise ValueError(
                f"plan of layer {self.plan.layer}: {', '.join(lost)} looks at the keys themselves, and the cache "
                'stores them quantised; use a cache of numbers (cache="model") or calibrate with --families window'
            )
        return self.with_choices(choice.over_stored() or EXACT for choice in self.plan.choices)

    def of_heads(self, heads: tuple[int, ...], all_keys: bool = False) -> Program:
        """Returns the program of some key/value heads; with `all_keys` they read all keys that they are given."""
        known = self._parts.get((heads, all_keys))
        if known is None:
            chosen = [self.plan.choices[head] for head in heads]
            if all_keys:
                chosen = [Choice(None, choice.operands) for choice in chosen]
            known = self._parts[heads, all_keys] = self.with_choices(chosen, heads)
        return known

    def is_exact_for(self, q_len: int) -> bool:
        """Whether a call of so many query rows is a decode step that the plan leaves exact."""
        return self.exact_steps and q_len < PRECISE_ROWS

    @cached_property
    def counts_rows(self) -> bool:
        """Whether it depends on the query rows of a sequence what is computed."""
        return self.exact_steps or any(choice.operands for choice in self.plan.choices)

    @cached_property
    def has_gradient(self) -> bool:
        """Whether gradients flow through every choice."""
        return all(choice.has_gradient for choice, _ in self.launches)

    @cached_property
    def requests(self) -> Mapping[bool, Requests]:
        """The requests of sequences with fewer than `PRECISE_ROWS` query rows (True), and of all others (False)."""
        return {few: self._requests(few) for few in (True, False)}

    def _requests(self, few: bool) -> Requests:
        asked = {choice: choice.head_rule(few) for choice, _ in self.launches}
        heads = [head for head, choice in enumerate(self.plan.choices) if asked[choice] is not None]
        rules = [asked[self.plan.choices[head]] or {} for head in heads]
        apart = tuple((choice, heads) for choice, heads in self.launches if asked[choice] is None)
        if not any(rules):
            return Requests(tuple(heads), None, None, apart)
        mean = self.tensors.key_mean if any(rule.get("precision") == "int8" for rule in rules) else None
        found = head_rules(rules, None if mean is None else mean[heads])
        return Requests(tuple(heads), found, replace(found, until=self.max_length), apart)


def head_rules(rules: Sequence[Mapping[str, Any]], key_mean: Tensor | None = None) -> HeadRules:
    """Returns what `Choice.head_rule` says of each head as the rules of one request."""
    return HeadRules(
        tuple(rule.get("window", 0) for rule in rules),
        tuple(rule.get("sinks", 0) for rule in rules),
        tuple(rule.get("precision", "model") for rule in rules),
        key_mean=key_mean,
    )
