"""What a call may ask of each key/value head separately: a window, a precision of the products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .rounding import through_dtype, through_int8
from .structure import CallStructure

if TYPE_CHECKING:
    from .request import AttentionRequest

HEAD_PRECISIONS = ("model", "bf16", "int8")

ALL = 1 << 30
"""The window of a head that has none, and the most that tables of int32 are told of: no call has as many keys."""

HeadWindows = tuple[tuple[int, int], ...]
"""Window and sinks of each key/value head."""


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
    """

    windows: tuple[int, ...]
    sinks: tuple[int, ...]
    precisions: tuple[str, ...]
    key_mean: Tensor | None = None
    until: int | None = None

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

    @cached_property
    def precision(self) -> str:
        """The precision of all heads, `mixed` where they differ."""
        return self.precisions[0] if len(set(self.precisions)) == 1 else "mixed"

    @cached_property
    def windowed(self) -> bool:
        """Whether any head has a window."""
        return any(self.windows)

    @cached_property
    def has_sinks(self) -> bool:
        """Whether any head has sinks."""
        return any(self.sinks)

    @cached_property
    def where_free(self) -> tuple[tuple[HeadWindows, int], tuple[HeadWindows, int]]:
        """`windows_and_reach` in structures without a window: those that look both ways, and causal ones."""
        both_ways, causal = (CallStructure(1, 1, 1, causal=causal) for causal in (False, True))
        return windows_and_reach(both_ways, self), windows_and_reach(causal, self)

    def work_out(self) -> tuple[str, bool, bool]:
        """All that a choice of a backend asks of the rules, which is remembered with them."""
        return self.precision, self.windowed, self.has_sinks

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

    def window_in(self, structure: CallStructure, head: int) -> tuple[int | None, int]:
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


def head_windows(structure: CallStructure, rules: HeadRules | None, kv_heads: int) -> HeadWindows | None:
    """Window and sinks of each key/value head in a call of a structure, None where no head has a window."""
    if rules is None:
        if structure.window is None or not structure.windowed:
            return None
        return ((structure.window, min(structure.sinks, ALL)),) * kv_heads
    # every step of a generation asks with a structure of its own, of which only the rules then decide
    free = structure.window is None
    windows, reach = rules.where_free[structure.causal] if free else structure.derived(windows_and_reach, rules)
    return windows if reach < structure.kv_len else None


def windows_and_reach(structure: CallStructure, rules: HeadRules) -> tuple[HeadWindows, int]:
    """Window and sinks of each key/value head, and how many keys the narrowest leaves; ALL without a window."""
    found = [rules.window_in(structure, head) for head in range(len(rules.windows))]
    # towards later keys no sink is exempt from a window that looks both ways
    reaches = [w + (sinks if structure.causal else 0) for w, sinks in found if w is not None]
    narrow = tuple((ALL, 0) if w is None else (min(w, ALL), min(s, ALL)) for w, s in found)
    return narrow, min(reaches, default=ALL)


def as_dense_mask(request: AttentionRequest) -> AttentionRequest:
    """Returns the request without rules per head whose exact attention is the same: the definition of `HeadRules`.

    Queries, keys and values are rounded in their own dtype, and a dense mask says what each head sees.
    """
    rules = request.per_head
    if rules is None:
        return request
    request = _rounded(replace(request, per_head=None), rules)
    if not rules.windowed:
        return request
    kv_heads, structure = request.key.shape[1], request.structure
    groups = request.query.shape[1] // kv_heads
    masks, beyond = [], None
    if rules.until is not None:
        device = request.query.device
        beyond = structure.visible(device=device) & (structure.positions(device)[:, None, :, None] >= rules.until)
    for head in range(kv_heads):
        window, sinks = rules.window_in(structure, head)
        own = structure.with_changes(window=window, sinks=sinks).visible(device=request.query.device)
        if beyond is not None:
            own = own | beyond
        if own.shape[1] > 1:
            own = own[:, head * groups : (head + 1) * groups]
        masks.append(own.expand(request.query.shape[0], groups, *own.shape[2:]))
    return replace(request, structure=structure.with_changes(mask=torch.cat(masks, dim=1)))


def _rounded(request: AttentionRequest, rules: HeadRules) -> AttentionRequest:
    if rules.precision == "model":
        return request
    kv_heads = request.key.shape[1]
    groups = request.query.shape[1] // kv_heads
    parts: list[list[Tensor]] = [[], [], []]
    for head, precision in enumerate(rules.precisions):
        query = request.query[:, head * groups : (head + 1) * groups]
        key, value = request.key[:, head : head + 1], request.value[:, head : head + 1]
        if precision == "bf16":
            query, key, value = (through_dtype(t, torch.bfloat16) for t in (query, key, value))
        elif precision == "int8":
            # the mean is added back: softcapped scores and learned sinks would feel a shift of all scores
            mean = 0.0 if rules.key_mean is None else rules.key_mean[head].to(key)
            query, key, value = through_int8(query), through_int8(key - mean) + mean, through_int8(value)
        for part, tensor in zip(parts, (query, key, value), strict=True):
            part.append(tensor)
    query, key, value = (torch.cat(part, dim=1) for part in parts)
    return replace(request, query=query, key=key, value=value)


def some_heads(request: AttentionRequest, kv_heads: Sequence[int]) -> AttentionRequest:
    """Returns the request of a few key/value heads and the query heads that share them; views where they adjoin."""
    total, groups = request.key.shape[1], request.query.shape[1] // request.key.shape[1]
    if list(kv_heads) == list(range(total)):
        return request
    heads = [head * groups + member for head in kv_heads for member in range(groups)]

    def rows(tensor: Tensor, dim: int, index: Sequence[int]) -> Tensor:
        if list(index) == list(range(index[0], index[0] + len(index))):
            return tensor.narrow(dim, index[0], len(index))
        return tensor.index_select(dim, torch.tensor(index, dtype=torch.int64, device=tensor.device))

    structure = request.structure
    if structure.mask is not None and structure.mask.shape[1] > 1:
        structure = structure.with_changes(mask=rows(structure.mask, 1, heads))
    bias = request.bias
    return replace(
        request,
        query=rows(request.query, 1, heads),
        key=rows(request.key, 1, kv_heads),
        value=rows(request.value, 1, kv_heads),
        stored=None if request.stored is None else request.stored.of_heads(kv_heads),
        structure=structure,
        sink_logits=None if request.sink_logits is None else rows(request.sink_logits, 0, heads),
        bias=bias if bias is None or bias.shape[1] == 1 else rows(bias, 1, heads),
        per_head=None if request.per_head is None else request.per_head.some(kv_heads),
    )


def some_rows(request: AttentionRequest, rows: Tensor) -> AttentionRequest:
    """Returns the request of a few query `rows` `[rows]` against all keys, with a dense mask of what they see."""
    if request.per_head is not None:  # which counts rows of the whole call
        request = as_dense_mask(request.widened())
    device, structure, bias = request.query.device, request.structure, request.bias
    visible, rows = structure.visible(rows=rows, device=device), rows.to(device)
    return replace(
        request,
        query=request.query.index_select(2, rows),
        structure=CallStructure(structure.batch, len(rows), structure.kv_len, mask=visible),
        bias=bias if bias is None or bias.shape[-2] == 1 else bias[..., rows, :],
    )


def some_range(request: AttentionRequest, first: int, stop: int) -> AttentionRequest:
    """Returns the request of the query rows from `first` to before `stop` of a causal call, plain or padded.

    Keys after the last of these rows are left out, unless they are codes, whose record speaks of all of them.
    """
    structure, key, value, bias = request.structure, request.key, request.value, request.bias
    seen = structure.kv_len if request.stored is not None else min(structure.kv_len, structure.offset() + stop)
    if bias is not None:
        bias = bias if bias.shape[-2] == 1 else bias[..., first:stop, :]
        bias = bias if bias.shape[-1] == 1 else bias[..., :seen]
    return replace(
        request,
        query=request.query[:, :, first:stop],
        key=key[:, :, :seen],
        value=value[:, :, :seen],
        structure=structure.derived(_range_of, first, stop, seen),
        bias=bias,
    )


def _range_of(structure: CallStructure, first: int, stop: int, seen: int) -> CallStructure:
    padding = None if structure.key_padding is None else structure.key_padding[:, :seen]
    return structure.with_changes(
        q_len=stop - first, kv_len=seen, q_offset=structure.offset() + first, key_padding=padding
    )


def joined_heads(parts: Sequence[Tensor], order: Sequence[int], groups: int, dim: int) -> Tensor:
    """Returns the parts of several `some_heads`, joined along `dim` and back in the model's order of heads.

    `order` are the key/value heads of all parts, one after the other, each with `groups` query heads.
    """
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
    if list(order) == sorted(order):
        return whole
    position = {head: index for index, head in enumerate(order)}
    index = [position[head] * groups + member for head in sorted(order) for member in range(groups)]
    return whole.index_select(dim, torch.tensor(index, dtype=torch.int64, device=whole.device))
