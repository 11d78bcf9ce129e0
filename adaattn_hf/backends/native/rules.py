"""How a structure becomes the rules of a call."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ...attention.structure import CallStructure
from .call import Rules

__all__ = ["rules_of", "with_extras"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_FAR = 1 << 40  # further than any key: a window or sinks beyond it hide and exempt the same keys

# Rules without tensors are the same for every forward pass of like shape; making and packing them costs microseconds.
_plain = functools.lru_cache(maxsize=256)(Rules)


def rules_of(structure: CallStructure) -> Rules:
    """The rules of a structure; remembered with it, so that the layers of a forward pass share them."""
    rules: Rules | None = structure._memo.get("native")
    if rules is None:
        rules = structure._memo["native"] = _find_rules(structure)
    return rules


def _find_rules(structure: CallStructure) -> Rules:
    window = -1 if structure.window is None else min(structure.window, _FAR)
    sinks = min(structure.sinks, _FAR)
    simple = (
        structure.key_padding is None
        and structure.k_segments is None
        and structure.chunk is None
        and structure.spans is None
        and structure.mask is None
    )
    if simple:
        plain = Rules if torch.compiler.is_compiling() else _plain
        return plain(structure.causal, window, sinks, structure.offset())
    # sinks count from the first key of a sequence, which a run that begins at a chunk's border does not know
    runs = None if structure.chunk is not None and structure.sinks else structure.segments()
    if (
        not runs
    ):  # none could be told, or no query sees any key: an empty table would say that there are no borders
        return Rules(mask=structure.visible())
    table = torch.tensor(runs, dtype=torch.int64).reshape(-1, 6)
    return Rules(structure.causal, window, sinks, segments=table)


def with_extras(
    rules: Rules, bias: Tensor | None, sink_logits: Tensor | None, softcap: float, kv_len: int
) -> Rules:
    """The rules with what changes the scores.

    Args:
        rules: Which keys are visible.
        bias: Broadcastable to `[batch, heads, q_len, kv_len]`.
        sink_logits: `[heads]`.
        softcap: 0 for none.
        kv_len: Extent of the keys.
    """
    if bias is None and sink_logits is None and not softcap:
        return rules
    if bias is not None:
        bias = bias.detach()
        bias = (bias if bias.dtype in _FLOATS else bias.float())[(None,) * (4 - bias.dim())]
        bias = bias.resolve_neg()
        if bias.shape[3] == 1:
            bias = bias.expand(*bias.shape[:3], kv_len)
    if sink_logits is not None:
        sink_logits = sink_logits.detach().float().resolve_neg().contiguous()
    return replace(rules, bias=bias, sink_logits=sink_logits, softcap=softcap)
