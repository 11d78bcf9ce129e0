"""Keys and values in pages of a common cache, as engines for many requests keep them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import Options
from .attention.runs import Runs
from .attention.structure import Segment
from .run import attend


def gathered(k_pages: Tensor, v_pages: Tensor, table: Tensor, cu_k: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values of all sequences out of their pages, `[k_tokens, num_kv_heads, head_dim]` each.

    Args:
        k_pages, v_pages: `[pages, page_size, num_kv_heads, head_dim]`.
        table: `[sequences, pages_per_sequence]` numbers of pages.
        cu_k: Running sums of the sequences' lengths in keys.

    Raises:
        ValueError: Fewer pages than a sequence is long, or a page that is not there.
    """
    pages, size = k_pages.shape[:2]
    within = torch.arange(size)
    pieces = [torch.empty(0, dtype=torch.long)]
    if table.shape[0] != len(cu_k) - 1:
        raise ValueError(f"block_table: got {table.shape[0]} rows for {len(cu_k) - 1} sequences, expected one each")
    for sequence, (row, (start, stop)) in enumerate(zip(table.tolist(), itertools.pairwise(cu_k), strict=True)):
        used = _pages_of(row, sequence, stop - start, size, pages)
        pieces.append((torch.tensor(used, dtype=torch.long)[:, None] * size + within).flatten()[: stop - start])
    tokens = torch.cat(pieces).to(k_pages.device)
    return k_pages.flatten(0, 1)[tokens], v_pages.flatten(0, 1)[tokens]


def _pages_of(row: Sequence[int], sequence: int, length: int, size: int, pages: int) -> list[int]:
    """The pages of a sequence's tokens.

    Raises:
        ValueError: Fewer pages than the sequence is long, or a page that is not there.
    """
    used = list(row[: -(-length // size)])
    if len(used) * size < length:
        raise ValueError(
            f"block_table: got {len(row)} pages of {size} tokens for sequence {sequence} of {length} tokens"
        )
    for page in used:
        if not 0 <= page < pages:
            raise ValueError(f"block_table: got page {page} for sequence {sequence}, expected 0 to {pages - 1}")
    return used


def write_pages(pages: Tensor, fresh: Tensor, table: Tensor, lengths: Sequence[int]) -> None:
    """Writes new tokens behind those that the pages hold, in place.

    Args:
        pages: `[pages, page_size, num_kv_heads, head_dim]`.
        fresh: `[sequences, new, num_kv_heads, head_dim]`.
        table: `[sequences, pages_per_sequence]`.
        lengths: Tokens held so far; a sequence of a negative length is none and gets nothing.

    Raises:
        ValueError: Fewer pages than a sequence needs, or a page that is not there.
    """
    (count, size), new = pages.shape[:2], fresh.shape[1]
    sequences, at_page, at_slot = [], [], []
    for sequence, (row, length) in enumerate(zip(table.tolist(), lengths, strict=True)):
        if length < 0:
            continue
        used = _pages_of(row, sequence, length + new, size, count)
        sequences.append(sequence)
        at_page.append([used[at // size] for at in range(length, length + new)])
        at_slot.append([at % size for at in range(length, length + new)])
    if sequences:
        index = (torch.tensor(i, device=pages.device) for i in (at_page, at_slot))
        pages[tuple(index)] = fresh[torch.tensor(sequences, device=pages.device)]


def attend_pages(
    query: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Sequence[int], asked: Options
) -> tuple[Tensor, Tensor]:
    """One query per sequence over its pages where they lie: each page by itself, merged by their log-sum-exp.

    Args:
        query: `[sequences, 1, heads, head_dim]`.
        k_pages, v_pages: `[pages, page_size, num_kv_heads, head_dim]`.
        table: `[sequences, pages_per_sequence]`.
        lengths: Tokens of each sequence, the query's own counted; 0 for none.
        asked: The keywords of the call; the query stands at the last token.

    Returns:
        `[sequences, 1, heads, head_dim_v]` and the log-sum-exp `[sequences, heads, 1]`.
    """
    sequences, _, heads, _ = query.shape
    pages, size = k_pages.shape[:2]
    most = max(1, -(-max(lengths, default=0) // size))
    structure = _page_runs(tuple(map(tuple, table[:, :most].tolist())), tuple(lengths), size, pages, most, asked.window)
    repeated = query.expand(sequences, most, heads, query.shape[3]).reshape(1, sequences * most, heads, -1)
    key, value = (t.reshape(1, pages * size, *t.shape[2:]).transpose(1, 2) for t in (k_pages, v_pages))
    bare = asked._replace(sink_logits=None)
    part = attend(structure, repeated.transpose(1, 2), key, value, bare, need_lse=True)
    out = part.out.view(sequences, most, heads, -1)
    lse = part.lse.view(heads, sequences, most).permute(1, 2, 0)
    sinks = None if asked.sink_logits is None else asked.sink_logits.float().expand(sequences, 1, heads)
    columns = lse if sinks is None else torch.cat([lse, sinks], dim=1)
    total = torch.logsumexp(columns, dim=1, keepdim=True)
    weight = torch.where(torch.isinf(total), torch.zeros_like(lse), torch.exp(lse - total))
    merged = (weight.unsqueeze(3) * out.float()).sum(1, keepdim=True).to(query.dtype)
    return merged, total.transpose(1, 2)


@functools.lru_cache(maxsize=16)
def _page_runs(
    table: tuple[tuple[int, ...], ...], lengths: tuple[int, ...], size: int, pages: int, most: int, window: int | None
) -> Runs:
    """One run for each page that a sequence's query sees anything of; the pages are one long row of keys."""
    runs = []
    for sequence, (row, length) in enumerate(zip(table, lengths, strict=True)):
        for index, page in enumerate(_pages_of(row, sequence, length, size, pages)):
            start = index * size
            held = min(size, length - start)
            if window is None or start + held > length - window:
                runs.append(Segment(0, sequence * most + index, 1, page * size, held, length - 1 - start))
    return Runs.of(runs, 1, len(lengths) * most, pages * size, True, window)
