"""The candidate choices of a unit: which keys it reads, or a rank, combined with precisions.

To first order the effects of combined parts add up, so risks are measured per part and prices per combination.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import unknown
from ..plans.choices import Choice, Part, Setting, all_keys, all_operands

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

    def among(self, labels: Sequence[str]) -> Self:
        """Returns those of some labels."""
        places = [place for place, choice in enumerate(self.choices) if choice.label in labels]
        return replace(self, choices=tuple(self.choices[place] for place in places), combine=self.combine[places])


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


def candidates(setting: Setting) -> Candidates:
    """Returns the choices that make sense in a setting, as each kind of part names its own; see `Part.candidates`.

    To save memory only those that make a head keep fewer tokens in the cache.
    """
    refuse_unknown(setting.families)

    def parts_of(kinds: Sequence[type[Part]]) -> list[Part]:
        wanted = [kind for kind in kinds if not set(kind.families).isdisjoint(setting.families)]
        return [part for kind in wanted for part in kind.candidates(setting)]

    keys, alone, crossing = parts_of(all_keys()), list[Part](), list[Part]()
    if setting.memory:
        keys = [part for part in keys if Choice.of(part).span is not None]
    else:
        alone = parts_of([kind for kind in all_operands() if not kind.crosses])
        crossing = parts_of([kind for kind in all_operands() if kind.crosses])
    parts = (*keys, *alone, *crossing)
    bases, crossed = ([(), *((part,) for part in each)] for each in (keys, crossing))
    combinations = [*((*base, *more) for base in bases for more in crossed), *((part,) for part in alone)]
    combine = np.array([[float(part in chosen) for part in parts] for chosen in combinations])
    return Candidates(
        tuple(Choice.of(*chosen) for chosen in combinations),
        tuple(Choice.of(part) for part in parts),
        combine.reshape(len(combinations), len(parts)),
    )
