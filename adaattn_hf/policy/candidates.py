"""The candidate choices of a unit: which keys it reads, or a rank, combined with precisions.

To first order the effects of combined parts add up, so risks are measured per part and prices per combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..errors import unknown
from ..plans.choices import EXACT, Choice, Part, Setting, all_keys, all_operands
from ..plans.choices.window import WINDOWS

FAMILIES = tuple(name for kind in (*all_keys(), *all_operands()) for name in kind.families if kind.by_default)
"""The families that are considered by default."""


@dataclass(frozen=True)
class Candidates:
    """All choices, exact first, and the `parts` from whose measured effects their risks are summed.

    `combine` `[len(choices), len(parts)]` is 1 where a choice contains a part, else 0.
    """

    choices: tuple[Choice, ...]
    parts: tuple[Choice, ...]
    combine: NDArray[np.float64]

    def among(self, labels: Sequence[str]) -> Candidates:
        """Returns those of some labels."""
        places = [place for place, choice in enumerate(self.choices) if choice.label in labels]
        return Candidates(tuple(self.choices[place] for place in places), self.parts, self.combine[places])


def known_families() -> tuple[str, ...]:
    """Returns the families of all kinds of parts."""
    return tuple(name for kind in (*all_keys(), *all_operands()) for name in kind.families)


def offered(families: Sequence[str], on_cuda: bool) -> tuple[str, ...]:
    """Returns the families to consider on a device: those that are named, or the default ones that pay there."""
    if not on_cuda or tuple(families) != FAMILIES:
        return tuple(families)
    pay = {name for kind in (*all_keys(), *all_operands()) if kind.on_cuda for name in kind.families}
    return tuple(name for name in FAMILIES if name in pay)


def refuse_unknown(families: Sequence[str]) -> None:
    """Refuses unknown family names."""
    names = known_families()
    for family in families:
        if family not in names:
            raise ValueError(unknown("family", family, names))


def candidates(
    length: int,
    head_dim: int,
    dtype: str,
    families: Sequence[str] = FAMILIES,
    windows: Sequence[int] = WINDOWS,
    causal: bool = True,
    memory: bool = False,
) -> Candidates:
    """Returns the choices that make sense for sequences up to `length` and heads of `head_dim` in `dtype`.

    Each kind of part names its own; see `Part.candidates`. With `memory` only those that make a head keep fewer tokens
    in the cache.
    """
    refuse_unknown(families)
    setting = Setting(length, head_dim, dtype, tuple(families), tuple(windows), causal, memory)
    if memory:
        spans = [part for part in _all(all_keys(), setting) if Choice.of(part).span is not None]
        return _of([(), *((part,) for part in spans)], spans)
    keys = _all(all_keys(), setting)
    alone = _all([kind for kind in all_operands() if not kind.crosses], setting)
    crossing = _all([kind for kind in all_operands() if kind.crosses], setting)
    bases = [(), *((part,) for part in keys)]
    combinations = [(*base, *crossed) for base in bases for crossed in [(), *((part,) for part in crossing)]]
    return _of([*combinations, *((part,) for part in alone)], (*keys, *alone, *crossing))


def _of(combinations: Sequence[tuple[Part, ...]], parts: Sequence[Part]) -> Candidates:
    rows = [[float(part in chosen) for part in parts] for chosen in combinations]
    return Candidates(
        tuple(Choice.of(*chosen) if chosen else EXACT for chosen in combinations),
        tuple(Choice.of(part) for part in parts),
        np.array(rows).reshape(len(combinations), len(parts)),
    )


def _all(kinds: Sequence[type[Part]], setting: Setting) -> list[Part]:
    asked = [kind for kind in kinds if not set(kind.families).isdisjoint(setting.families)]
    return list(chain.from_iterable(kind.candidates(setting) for kind in asked))
