"""From the dense mask that Transformers hands over back to the few rules that made it."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention.structure import MaskStructure

_KNOWN = "_adaattn_structure"


def structure_of(mask: Tensor, batch: int, kv_len: int, causal: bool, window: int | None) -> MaskStructure:
    """The rules of a boolean mask: padding, causality and window where they say exactly it, else the mask itself.

    Every guess is compared with the whole mask before it is taken. Found once for all layers that are handed the same
    mask, which keeps the answer until it is written to.

    Args:
        mask: Boolean `[batch or 1, heads or 1, q_len, at least kv_len]`, True where the query sees the key.
        batch: Of the queries.
        kv_len: Keys.
        causal: Whether the layer is causal.
        window: Window of the layer, the query's own key counted; None for none.
    """
    # tensors made in inference mode do not count writes: such a mask is taken to be made anew for every forward pass
    version = 0 if mask.is_inference() else mask._version
    asked = (version, batch, kv_len, causal, window)
    known: tuple[tuple[object, ...], MaskStructure] | None = getattr(mask, _KNOWN, None)
    if known is not None and known[0] == asked:
        return known[1]
    found, q_len, held = None, mask.shape[2], mask[..., :kv_len].bool()
    if mask.shape[1] == 1 and mask.shape[0] in (1, batch) and q_len and kv_len:
        rows = held[:, 0].expand(batch, -1, -1)
        for structure in _guesses(rows, causal, window):
            if torch.equal(structure.visible(device=mask.device)[:, 0].expand(batch, -1, -1), rows):
                found = structure.simplified()
                break
    if found is None:
        found = MaskStructure(batch, q_len, kv_len, mask=held)
    setattr(mask, _KNOWN, (asked, found))
    return found


def _guesses(rows: Tensor, causal: bool, window: int | None) -> list[MaskStructure]:
    """Structures that may have made `[batch, q_len, kv_len]`, likeliest first."""
    batch, q_len, kv_len = rows.shape
    seen_by_some = rows.any(1)
    if not causal:
        # Transformers counts the distance of a window that looks both ways inclusively
        windows = dict.fromkeys((None if window is None else window + 1, None))
        return [MaskStructure(batch, q_len, kv_len, window=w, key_padding=seen_by_some) for w in windows]
    columns = torch.arange(kv_len, device=rows.device)
    last = seen_by_some.any(0).nonzero()
    guesses = []
    # the last query stands at the last key that anybody sees (a cache with room), or at the last one
    for end in dict.fromkeys((int(last[-1]) + 1 if len(last) else kv_len, kv_len)):
        offset = end - q_len
        for w in dict.fromkeys((window, None)):
            # of keys behind the last query and before every window no query tells; they count as real, these where the
            # first key that a window reaches is
            first = 0 if w is None else max(offset - w + 1, 0)
            untold = (columns >= end) | (columns < first) & seen_by_some[:, first, None]
            guesses.append(MaskStructure(batch, q_len, kv_len, True, offset, w, key_padding=seen_by_some | untold))
    return guesses
