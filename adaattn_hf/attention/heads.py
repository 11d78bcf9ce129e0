"""What a call may ask of each key/value head separately: a window, a precision of the products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .kind import HEAD_BF16, HEAD_INT8, HEAD_SINKS, HEAD_UNTIL, HEAD_WINDOWS, PER_HEAD
from .structure import MaskStructure

HEAD_PRECISIONS = ("model", "bf16", "int8")

ALL = 1 << 30
"""The window of a head that has none, and the most that tables of int32 are told of: no call has as many keys."""

HeadWindows = tuple[tuple[int, int], ...]
"""Window and sinks of each key/value head."""
WindowsAndReach = tuple[HeadWindows, int]
"""These, and how many keys the narrowest leaves."""


@dataclass(frozen=True, eq=False)
class HeadRules:
    """Rules per key/value head, for it and the query heads that share it; they only ever take keys away.

    One entry per key/value head in every tuple. Compared by identity, so that what is made from the rules of a layer
    can be remembered with them.

    Attributes:
        windows: Keys before a query, the query itself counted, and as many after it where attention looks both ways; 0
            does not restrict, and neither does one that is not shorter than the structure's own window.
        sinks: First keys of the sequence that are exempt from the head's window; where the structure has a window of
            its own, its own sinks are exempt instead.
        precisions: `model` computes in the dtype at hand; `bf16` rounds queries, keys, weights and values to bfloat16;
            `int8` quantises queries, smoothed keys and values per token.
        key_mean: `[num_kv_heads, head_dim]`, subtracted from keys before they are rounded to int8; zeros when None.
        until: Position in a causal sequence from which on a query sees as if no head had a window; None for no such.
        features: What the kind of a call with these rules asks for, bits of `kind`.
        free: `windows_and_reach` in structures without a window: those that look both ways, and causal ones.
        kernels: Those that were made for these rules, by kind of call: what they hold goes with a plan.
    """

    windows: tuple[int, ...]
    sinks: tuple[int, ...]
    precisions: tuple[str, ...]
    key_mean: Tensor | None = None
    until: int | None = None
    features: int = field(init=False, default=0)
    free: tuple[WindowsAndReach, WindowsAndReach] = field(init=False, repr=False)
    kernels: dict[Any, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse rules that no head can follow."""
        heads = len(self.windows)
        lengths = (heads, len(self.sinks), len(self.precisions))
        if not heads or set(lengths) != {heads}:
            raise ValueError(
                f"per_head: got {lengths} entries of windows, sinks and precisions, expected one of each per "
                "key/value head; repeat a rule that holds for every head"
            )
        for head, (window, sinks, precision) in enumerate(zip(self.windows, self.sinks, self.precisions, strict=True)):
            if window < 0 or sinks < 0 or precision not in HEAD_PRECISIONS:
                raise ValueError(
                    f"per_head: got window {window}, sinks {sinks}, precision {precision!r} for head {head}, expected "
                    f"whole numbers from 0 and one of {HEAD_PRECISIONS}"
                )
        if self.key_mean is not None and (self.key_mean.dim() != 2 or self.key_mean.shape[0] != heads):
            raise ValueError(f"per_head.key_mean: got shape {tuple(self.key_mean.shape)}, expected [{heads}, head_dim]")

        bits = HEAD_WINDOWS if any(self.windows) else 0
        bits |= HEAD_BF16 if "bf16" in self.precisions else 0
        bits |= HEAD_INT8 if "int8" in self.precisions else 0
        bits |= PER_HEAD if bits else 0
        bits |= HEAD_SINKS if any(self.sinks) else 0
        bits |= HEAD_UNTIL if self.until is not None else 0
        object.__setattr__(self, "features", bits)
        both_ways, causal = (MaskStructure(1, 1, 1, causal=causal) for causal in (False, True))
        free = windows_and_reach(both_ways, self), windows_and_reach(causal, self)
        object.__setattr__(self, "free", free)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle, which has no kernels yet."""
        return {**self.__dict__, "kernels": {}}

    def check_fit(self, kv_heads: int, head_dim: int) -> None:
        """Refuses keys of another number of heads than the rules are for, and mean keys of another size."""
        if len(self.windows) != kv_heads:
            raise ValueError(
                f"per_head: got rules for {len(self.windows)} heads, expected one for each of the {kv_heads} key/value "
                "heads"
            )
        if self.key_mean is not None and self.key_mean.shape[1] != head_dim:
            raise ValueError(
                f"per_head.key_mean: got shape {tuple(self.key_mean.shape)}, expected [{len(self.windows)}, {head_dim}]"
            )

    def window_in(self, structure: MaskStructure, head: int) -> tuple[int | None, int]:
        """Window (None for none) and sinks of a head in a call of a structure, whose own window may be shorter."""
        window = self.windows[head]
        if not window or (structure.window is not None and structure.window <= window):
            return structure.window, structure.sinks
        return window, self.sinks[head] if structure.window is None else structure.sinks

    def some(self, kv_heads: Sequence[int]) -> HeadRules:
        """The rules of a few key/value heads."""
        return HeadRules(
            tuple(self.windows[head] for head in kv_heads),
            tuple(self.sinks[head] for head in kv_heads),
            tuple(self.precisions[head] for head in kv_heads),
            None if self.key_mean is None else self.key_mean[list(kv_heads)],
            self.until,
        )


def head_windows(structure: MaskStructure, rules: HeadRules | None, kv_heads: int) -> HeadWindows | None:
    """Window and sinks of each key/value head in a call of a structure, None where no head has a window."""
    if rules is None:
        if structure.window is None or not structure.windowed:
            return None
        return ((structure.window, min(structure.sinks, ALL)),) * kv_heads
    # every step of a generation asks with a structure of its own, of which only the rules then decide
    free = structure.window is None
    windows, reach = rules.free[structure.causal] if free else structure.cached(windows_and_reach, rules)
    return windows if reach < structure.kv_len else None


def windows_and_reach(structure: MaskStructure, rules: HeadRules) -> WindowsAndReach:
    """Window and sinks of each key/value head, and how many keys the narrowest leaves; ALL without a window."""
    found = [rules.window_in(structure, head) for head in range(len(rules.windows))]
    # towards later keys no sink is exempt from a window that looks both ways
    reaches = [w + (sinks if structure.causal else 0) for w, sinks in found if w is not None]
    narrow = tuple((ALL, 0) if w is None else (min(w, ALL), min(s, ALL)) for w, s in found)
    return narrow, min(reaches, default=ALL)
