"""Runs of unequal lengths as one packed row of tokens, for kernels that walk it without any mask."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .structure import MaskStructure, Segment

# What a run's queries see of its keys, as torch's memory-efficient kernel numbers it.
FULL, FROM_FIRST, TO_LAST = 0, 1, 2


class Packed(NamedTuple):
    """Where runs lie in the packed rows of queries and keys.

    Attributes:
        rule: All keys, causal from the first key on, or causal so that the last query sees the last key.
        q_lengths, k_lengths: Queries and keys of the runs.
        q_longest, k_longest: The most of them.
        q_borders, k_borders: Where they begin and end, int32 `[runs + 1]`.
        queries, keys: int64 places `row * len + position` of the packed tokens; None where they are all tokens.
    """

    rule: int
    q_lengths: list[int]
    k_lengths: list[int]
    q_longest: int
    k_longest: int
    q_borders: Tensor
    k_borders: Tensor
    queries: Tensor | None
    keys: Tensor | None


@torch.inference_mode(False)  # a later pass may keep the places for its gradients
def pack(
    structure: MaskStructure, runs: Sequence[Segment], rule: int, device: torch.device, keys: Tensor | None = None
) -> Packed:
    """Packs runs of a structure, on a device; `keys` are the places of their keys where these are no runs of a row."""

    def borders(lengths: list[int]) -> Tensor:
        return torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int32, device=device)

    q_lengths, k_lengths = [run.q_len for run in runs], [run.k_len for run in runs]
    batch, q_len, kv_len = structure.batch, structure.q_len, structure.kv_len
    queries = _places([(run.row * q_len + run.q_start, run.q_len) for run in runs], batch * q_len, device)
    if keys is None:
        keys = _places([(run.row * kv_len + run.k_start, run.k_len) for run in runs], batch * kv_len, device)
    return Packed(
        rule, q_lengths, k_lengths, max(q_lengths), max(k_lengths), borders(q_lengths), borders(k_lengths),
        queries, keys,
    )  # fmt: skip


def _places(runs: Sequence[tuple[int, int]], total: int, device: torch.device) -> Tensor | None:
    stop = 0
    for start, length in runs:
        if start != stop:
            return torch.cat([torch.arange(a, a + n, device="cpu") for a, n in runs]).to(device)
        stop = start + length
    return None if stop == total else torch.arange(stop, device=device)


def tokens_of(tensor: Tensor, places: Tensor | None) -> Tensor:
    """Packed tokens `[tokens, heads, dim]` of `[batch, heads, len, dim]`, the last dimension as contiguous memory."""
    tokens = tensor.transpose(1, 2).flatten(0, 1)
    if places is not None:
        return tokens.index_select(0, places)
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()
