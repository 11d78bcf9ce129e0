"""Reads a dense mask back into the rules that made it: where sequences begin, and how far their queries see."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .call import AttentionCall
from .structure import MaskStructure


def infer_structure(call: AttentionCall) -> AttentionCall | None:
    """Returns the call with rules in place of a dense mask, itself without such a mask, None where none fit.

    Causality, padding on either side, one window, documents and preallocated keys are found; the rules found make
    exactly the mask that was given. A bias that only hides keys counts as a mask; a row's finite numbers hide keys if
    it sees another one. Where a structure knows the padding besides the mask, nothing else is taken for padding.
    Looks at data.
    """
    structure, bias = call.structure, call.bias
    if structure.mask is None and bias is not None and structure.shape == "full" and not bias.requires_grad:
        hides = bias <= torch.finfo(bias.dtype).min / 2
        if not bool((hides | (bias == 0)).all()) or numbers_alone(call):
            return call
        structure = structure.with_changes(mask=~hides[(None,) * (4 - hides.dim())])
        call = replace(call, structure=structure, bias=None)
    if structure.mask is None or structure.spans is not None:
        return call
    inferred = structure.cached(_read, call.window)
    return None if inferred is None else replace(call, structure=inferred)


def numbers_alone(call: AttentionCall) -> tuple[Tensor, AttentionCall] | None:
    """Which rows `[…, q_len or 1, 1]` see large negative numbers alone, and the call without them; None for none."""
    if (bias := call.bias) is None:
        return None
    rows = (bias <= torch.finfo(bias.dtype).min / 2).all(3, keepdim=True) & ~bias.isneginf().all(3, keepdim=True)
    return (rows, replace(call, bias=bias.masked_fill(rows, -torch.inf))) if bool(rows.any()) else None


def _read(structure: MaskStructure, window: int | None) -> MaskStructure | None:
    visible = structure.visible(device=structure.mask.device if structure.mask is not None else "cpu")
    if visible.shape[1] > 1 and not bool((visible == visible[:, :1]).all()):
        return None
    visible = visible[:, :1].expand(structure.batch, -1, -1, -1)
    for candidate in _candidates(structure, visible[:, 0], window):
        if torch.equal(candidate.visible(device=visible.device).expand_as(visible), visible):
            return candidate
    return None


def _candidates(structure: MaskStructure, visible: Tensor, window: int | None) -> Iterator[MaskStructure]:
    batch, q_len, kv_len = visible.shape
    square = q_len == kv_len
    if structure.key_padding is not None:
        for ahead in (True, False):
            yield structure.with_changes(mask=None, causal=ahead, window=window)
        if square:
            yield from _documents(visible, window, structure.key_padding)
        return
    seen_keys = visible.any(1)
    rows = visible.any(2)
    if not bool(rows.any()):
        return
    index = torch.arange(kv_len, device=visible.device)
    last = torch.where(visible, index, -1).amax(2)
    offset = int((last - torch.arange(q_len, device=visible.device))[rows].max())
    padding = None if bool(seen_keys.all()) else seen_keys
    causal = MaskStructure(
        batch, q_len, kv_len, causal=True, q_offset=offset, key_padding=padding, dropped=structure.dropped
    )
    both = MaskStructure(batch, q_len, kv_len, key_padding=padding)
    if q_len > 1 and bool((last == last[:, :1])[rows].all()):
        yield both  # no query sees a key that another one does not
    if window is not None:
        # of keys before every window no query tells; they are real where the first that a window reaches is
        first = max(offset - window + 1, 0)
        real = seen_keys | (index < first) & seen_keys[:, first, None]
        yield causal.with_changes(window=window, key_padding=None if bool(real.all()) else real)
    yield causal
    yield both
    yield causal.with_changes(window=int(visible.sum(2).max()))
    if square and bool(rows.all()):
        yield from _documents(visible, window, None)


def _documents(visible: Tensor, window: int | None, padding: Tensor | None) -> Iterator[MaskStructure]:
    batch, length, _ = visible.shape
    sees = visible.diagonal(offset=-1, dim1=1, dim2=2)
    numbers = torch.cat([sees.new_zeros(batch, 1), ~sees], 1).cumsum(1)
    both = MaskStructure(
        batch, length, length, window=window, key_padding=padding, q_segments=numbers, k_segments=numbers
    )
    yield both.with_changes(causal=True)
    yield both
