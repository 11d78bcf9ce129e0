"""What a call may ask of each key/value head separately, and calls of some heads or rows, put together again."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from .call import AttentionCall, AttentionResult
from .kind import HEAD_BF16, HEAD_INT8, HEAD_SINKS, HEAD_UNTIL, HEAD_WINDOWS, PER_HEAD
from .stored import INT8_LEVELS
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
        free = (windows_and_reach(MaskStructure(1, 1, 1, causal=causal), self) for causal in (False, True))
        object.__setattr__(self, "free", tuple(free))

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy or a pickle, which has no kernels yet."""
        return {**self.__dict__, "kernels": {}}

    def windows_in(self, structure: MaskStructure) -> list[tuple[int | None, int]]:
        """Window (None for none) and sinks of each head in a call of a structure, whose own window may be shorter."""
        limit, sinks = structure.window, structure.sinks
        return [
            (limit, sinks)
            if not window or (limit is not None and limit <= window)
            else (window, first if limit is None else sinks)
            for window, first in zip(self.windows, self.sinks, strict=True)
        ]

    def some(self, kv_heads: Sequence[int]) -> Self:
        """The rules of a few key/value heads."""
        return replace(
            self,
            windows=tuple(self.windows[head] for head in kv_heads),
            sinks=tuple(self.sinks[head] for head in kv_heads),
            precisions=tuple(self.precisions[head] for head in kv_heads),
            key_mean=None if self.key_mean is None else self.key_mean[list(kv_heads)],
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
    windows = rules.windows_in(structure)
    # towards later keys no sink is exempt from a window that looks both ways
    reaches = [w + (sinks if structure.causal else 0) for w, sinks in windows if w is not None]
    narrow = tuple((ALL, 0) if w is None else (min(w, ALL), min(s, ALL)) for w, s in windows)
    return narrow, min(reaches, default=ALL)


def through_int8(tensor: Tensor) -> Tensor:
    """Returns the tensor after rounding to int8 and back, in its own dtype: one scale per vector of the last axis.

    The scale is of the vector itself, so that rounding a token never looks at another one; zeros stay zeros.
    """
    peak = tensor.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(peak > 0, peak / INT8_LEVELS, torch.ones_like(peak))
    codes = torch.round(tensor / scale).clamp_(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
    return codes.to(tensor.dtype) * scale


def through_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor after rounding to `dtype` and back."""
    return tensor.to(dtype).to(tensor.dtype)


def through_precision(
    precision: str, query: Tensor, key: Tensor, value: Tensor, mean: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values after rounding to one of `HEAD_PRECISIONS` and back, keys less their `mean`.

    The mean is added back: softcapped scores and learned sinks would feel a shift of all scores.
    """
    if precision == "bf16":
        query, key, value = (through_dtype(tensor, torch.bfloat16) for tensor in (query, key, value))
    elif precision == "int8":
        smooth = through_int8(key) if mean is None else through_int8(key - mean) + mean
        query, key, value = through_int8(query), smooth, through_int8(value)
    return query, key, value


def reference_call(call: AttentionCall) -> AttentionCall:
    """The call without rules per head whose exact attention is the same: the definition of `HeadRules`.

    Queries, keys and values are rounded in their own dtype, and a dense mask says what each head sees.
    """
    rules = call.per_head
    if rules is None:
        return call
    structure, groups, beyond = call.structure, call.query.shape[1] // call.key.shape[1], None
    masks: list[Tensor] = []
    tensors: list[tuple[Tensor, Tensor, Tensor]] = []
    if rules.until is not None and any(rules.windows):
        device = call.query.device
        beyond = structure.visible(device=device) & (structure.positions(device)[:, None, :, None] >= rules.until)
    for head, (window, sinks) in enumerate(rules.windows_in(structure)):
        queries = slice(head * groups, (head + 1) * groups)
        parts = call.query[:, queries], call.key[:, head : head + 1], call.value[:, head : head + 1]
        mean = None if rules.key_mean is None else rules.key_mean[head].to(call.key)
        tensors.append(through_precision(rules.precisions[head], *parts, mean))
        if any(rules.windows):
            mask = structure.with_changes(window=window, sinks=sinks).visible(device=call.query.device)
            mask = mask if beyond is None else mask | beyond
            mask = mask[:, queries] if mask.shape[1] > 1 else mask
            masks.append(mask.expand(call.query.shape[0], groups, *mask.shape[2:]))
    if set(rules.precisions) != {"model"}:
        query, key, value = (torch.cat(parts, dim=1) for parts in zip(*tensors, strict=True))
        call = replace(call, query=query, key=key, value=value)
    if masks:
        structure = structure.with_changes(mask=torch.cat(masks, dim=1))
    return replace(call, per_head=None, structure=structure)


def picked(tensor: Tensor, index: Sequence[int], dim: int) -> Tensor:
    """Returns these entries of a dimension, a view where they adjoin.

    They are put together of views: an index would have to be copied to the device, which no graph can capture.
    """
    runs: list[list[int]] = []
    for at in index:
        if runs and at == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([at, 1])
    parts = [tensor.narrow(dim, first, count) for first, count in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def some_heads(call: AttentionCall, kv_heads: Sequence[int]) -> AttentionCall:
    """Returns the call of a few key/value heads and the query heads that share them; views where they adjoin."""
    total, groups = call.key.shape[1], call.query.shape[1] // call.key.shape[1]
    if list(kv_heads) == list(range(total)):
        return call
    heads = [head * groups + member for head in kv_heads for member in range(groups)]
    structure = call.structure
    if structure.mask is not None and structure.mask.shape[1] > 1:
        structure = structure.with_changes(mask=picked(structure.mask, heads, 1))
    bias = call.bias
    return replace(
        call,
        query=picked(call.query, heads, 1),
        key=picked(call.key, kv_heads, 1),
        value=picked(call.value, kv_heads, 1),
        stored=None if call.stored is None else call.stored.of_heads(kv_heads),
        structure=structure,
        sink_logits=None if call.sink_logits is None else picked(call.sink_logits, heads, 0),
        bias=bias if bias is None or bias.shape[1] == 1 else picked(bias, heads, 1),
        per_head=None if call.per_head is None else call.per_head.some(kv_heads),
    )


def some_rows(call: AttentionCall, rows: Tensor) -> AttentionCall:
    """Returns the call of a few query `rows` `[rows]` against all keys, with a dense mask of what they see."""
    if call.per_head is not None:  # which counts rows of the whole call
        call = reference_call(call.dequantised())
    device, structure, bias = call.query.device, call.structure, call.bias
    visible, rows = structure.visible(rows=rows, device=device), rows.to(device)
    return replace(
        call,
        query=call.query.index_select(2, rows),
        structure=MaskStructure(structure.batch, len(rows), structure.kv_len, mask=visible),
        bias=bias if bias is None or bias.shape[-2] == 1 else bias[..., rows, :],
    )


def some_range(call: AttentionCall, first: int, stop: int) -> AttentionCall:
    """Returns the call of the query rows from `first` to before `stop` of a causal call, plain or padded.

    Keys after the last of these rows are left out, unless they are codes, whose record speaks of all of them.
    """
    structure, key, value, bias = call.structure, call.key, call.value, call.bias
    keys = structure.kv_len if call.stored is not None else min(structure.kv_len, structure.offset() + stop)
    if bias is not None:
        bias = bias if bias.shape[-2] == 1 else bias[..., first:stop, :]
        bias = bias if bias.shape[-1] == 1 else bias[..., :keys]
    query, key, value = call.query[:, :, first:stop], key[:, :, :keys], value[:, :, :keys]
    part = structure.cached(_range_of, first, stop, keys)
    return replace(call, query=query, key=key, value=value, structure=part, bias=bias)


def _range_of(structure: MaskStructure, first: int, stop: int, keys: int) -> MaskStructure:
    padding = None if structure.key_padding is None else structure.key_padding[:, :keys]
    return structure.with_changes(
        q_len=stop - first, kv_len=keys, q_offset=structure.offset() + first, key_padding=padding
    )


def joined_heads(parts: Sequence[tuple[Sequence[int], AttentionResult]], groups: int) -> AttentionResult:
    """Returns the results of several `some_heads` as one, in the model's order of heads.

    Each comes with its key/value heads, each of which has `groups` query heads.
    """
    location = {head: (part, at) for part, (heads, _) in enumerate(parts) for at, head in enumerate(heads)}
    order = [location[head] for head in sorted(location)]

    def together(tensors: list[Tensor], dim: int) -> Tensor:
        if list(location) == sorted(location):
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
        return torch.cat([tensors[part].narrow(dim, at * groups, groups) for part, at in order], dim)

    lses = [result.lse for _, result in parts if result.lse is not None]
    out, lse = together([result.out for _, result in parts], 2), together(lses, 1) if lses else None
    return AttentionResult(out, lse)
