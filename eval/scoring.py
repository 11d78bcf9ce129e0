"""Windows into batches, batches through every arm, logits into numbers per scored token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.models.cache_keyword import with_cache
from adaattn_hf.stats.paired import TokenScores, joined, score_tokens

from .windows import TokenWindow

_ROWS = 64
"""Rows of logits that are taken to float64 at a time: 64 x 50k x 8 bytes = 26 MB per arm."""
_CHUNK_BATCHES = 16


Keywords = dict[str, torch.Tensor]
"""A model's keywords for a batch."""
Batch = tuple[Keywords, tuple[int, ...]]
"""Its keywords, and the columns of padding before each window `[batch]`."""


def plan_batches(windows: Sequence[TokenWindow], batch_size: int, padding: str = "none") -> list[list[int]]:
    """Indices of the windows of each batch.

    Without padding a batch holds windows of one length, gathered from a stretch of the text, so that nothing
    is masked and documents are still finished in order. With padding a batch is the next `batch_size`
    windows, as they come. The plan depends on the windows and these settings alone, never on where a run was
    interrupted.
    """
    if padding != "none":
        return [list(range(i, min(i + batch_size, len(windows)))) for i in range(0, len(windows), batch_size)]
    chunk = batch_size * _CHUNK_BATCHES
    batches = []
    for begin in range(0, len(windows), chunk):
        order = sorted(range(begin, min(begin + chunk, len(windows))), key=lambda i: (-len(windows[i].input_ids), i))
        for _, same in groupby(order, key=lambda i: len(windows[i].input_ids)):
            indices = list(same)
            batches += [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    return batches


def collate(windows: Sequence[TokenWindow], device: torch.device, padding: str = "none", pad_token: int = 0) -> Batch:
    """The inputs of a batch. Windows of one length are stacked; others need `padding` `left` or `right`."""
    lengths = [len(w.input_ids) for w in windows]
    longest = max(lengths)
    if padding == "none":
        stacked = torch.from_numpy(np.stack([w.input_ids for w in windows]))
        return {"input_ids": stacked.to(device)}, (0,) * len(windows)
    offsets = tuple(longest - n if padding == "left" else 0 for n in lengths)
    input_ids = torch.full((len(windows), longest), pad_token, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(input_ids)
    for row, (window, offset, length) in enumerate(zip(windows, offsets, lengths, strict=True)):
        input_ids[row, offset : offset + length] = torch.from_numpy(window.input_ids)
        mask[row, offset : offset + length] = 1
    keywords = {"input_ids": input_ids, "attention_mask": mask}
    if padding == "left":
        keywords["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return {name: value.to(device) for name, value in keywords.items()}, offsets


def forward(
    model: Any, keywords: Keywords, cache: str | None = None, piece: int = 64, streaming: bool = False
) -> torch.Tensor:
    """Logits `[batch, length, vocab]` without gradients.

    A `cache` names what it stores, `dynamic` Transformers' own: unpadded tokens are read in pieces over it. With
    `streaming`, heads with a window keep it alone in the cache.
    """
    with torch.inference_mode():
        if cache is None:
            more: dict[str, Any] = {"use_cache": False} if model.can_generate() else {}
            return model(**keywords, **more).logits  # type: ignore[no-any-return]
        stock = cache == "dynamic"
        keys: Any = DynamicCache(config=model.config) if stock else AdaAttnCache(model, cache, streaming=streaming)
        cached = with_cache(model, keys)
        parts = keywords["input_ids"].split(piece, dim=1)
        return torch.cat([model(part, use_cache=True, **cached).logits for part in parts], dim=1)


def score(logits: Sequence[torch.Tensor], windows: Sequence[TokenWindow], offsets: Sequence[int]) -> TokenScores:
    """Scores of one batch. `logits` holds `[batch, length, vocab]` for each arm, the stock arm first.

    See `adaattn_hf.stats.paired.score_tokens`, which takes them a few rows at a time.
    """
    rows = [np.full(len(w.targets), i) for i, w in enumerate(windows)]
    columns = [w.rows + o for w, o in zip(windows, offsets, strict=True)]
    places = (rows, columns, [w.targets for w in windows])
    row, column, targets = (torch.from_numpy(np.concatenate(one)).to(logits[0].device) for one in places)
    parts = zip(row.split(_ROWS), column.split(_ROWS), targets.split(_ROWS), strict=True)
    return joined([score_tokens([arm[r, c] for arm in logits], t) for r, c, t in parts])
