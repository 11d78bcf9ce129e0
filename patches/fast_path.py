"""The fast path of small calls: what one call worked out is kept for those that look like it.

Where the device is quicker than Python, a layer costs what stands around its kernel. A structure keeps the call that
its last layer came to: the mask of a forward pass holds one structure for all layers, and structures without tensors
serve later passes of like shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import NOBODY, listening
from adaattn_hf.backends.base import FastCall, spec_of
from adaattn_hf.backends.select import attend, choose

from .families import HARMLESS, loses_borders

__all__ = [
    "MOST",
    "Ready",
    "attend_and_keep",
    "collects_weights",
    "facts_of",
    "maskless",
    "may_share",
    "recall",
    "remember",
    "structure_at_hand",
    "undisturbed",
]

IDLE = HARMLESS | {"position_ids"}
"""Keywords that change no call; positions do in some families, whose calls are not kept."""

MOST = 64
"""Structures that are kept; a decode passes through a new one with every token."""

_structures: dict[Hashable, CallStructure] = {}

recall = _structures.get

_collector = output_capturing._active_collector
_casts = torch._C._is_any_autocast_enabled


def tracing() -> bool:
    """Whether torch.compile or torch.jit.trace records a graph, which would keep what data says now."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def may_share() -> bool:
    """Whether structures may be kept: a tracer's lengths are symbols, what a dispatch mode sees must not outlive it."""
    return not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())


def remember(key: Hashable, structure: CallStructure) -> None:
    """Keeps a structure under everything that it was made from."""
    if len(_structures) >= MOST:
        _structures.clear()
    _structures[key] = structure


class Ready(NamedTuple):
    """A call that a layer came to, and the facts under which it did.

    Attributes:
        config: The configuration of the module that asked.
        fields: Those of the configuration; they held no settings of ours, and may since.
        facts: What `facts_of` said.
        attend: The call.
    """

    config: Any
    fields: Mapping[str, Any]
    facts: Hashable
    attend: FastCall


def facts_of(backend: str | None, query: Tensor, key: Tensor, value: Tensor, stored: bool) -> Hashable:
    """What a kept call holds for, besides its structure: the backend that was named, and all but the numbers.

    `stored`: whether keys and values are codes of a cache.
    """
    return (
        backend,
        stored,
        query.dtype,
        key.dtype,
        value.dtype,
        query.shape,
        key.shape,
        value.shape,
        query.device,
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )


def structure_at_hand(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
) -> CallStructure | None:
    """The structure that `_read_mask` gives where no mask came, if it need not be made."""
    if attention_mask is not None or sliding_window is not None or not query.dim() == key.dim() == 4:
        return None
    return recall(maskless(module, query.shape, key.shape, is_causal))


def maskless(
    module: nn.Module, q_shape: torch.Size, k_shape: torch.Size, is_causal: bool | None
) -> tuple[int, int, int, bool]:
    """Batch, both lengths and causality of a call without a mask.

    Stock attention then aligns causality to the first key and lets a single query see everything.
    """
    batch, _, q_len, _ = q_shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    return batch, q_len, k_shape[2], bool(causal) and q_len > 1


def undisturbed(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Nothing but a call's tensors can make it differ from the pass's other calls: no cast, keyword or listener."""
    return (
        IDLE.issuperset(kwargs)
        and listening() == NOBODY
        and not _casts()
        and not module.__dict__.get("reorder_and_upcast_attn")
        and ((collector := _collector.get()) is None or "attentions" not in collector)
    )


def attend_and_keep(
    request: AttentionRequest,
    forced: str | None,
    backend: str | None,
    module: nn.Module,
    config: Any,
    kwargs: dict[str, Any],
    structure: CallStructure,
) -> Tensor:
    """Attention without extras but codes; the structure that came keeps the way to it for calls that look the same."""
    query, key, value = request.query, request.key, request.value
    beside = () if request.stored is None else (request.stored,)

    def find() -> FastCall | None:
        spec = spec_of(request, forced)
        return choose(spec, forced).fast_call(spec, request)

    facts = facts_of(backend, query, key, value, request.stored is not None)
    # other configurations may share the structure
    call = request.structure.cached(("call", forced, facts), find)
    if call is None:
        return attend(request, forced).out
    if undisturbed(module, kwargs) and not loses_borders(config):
        fields = {} if config is None else object.__getattribute__(config, "__dict__")
        structure.ready = Ready(config, fields, facts, call)
    return call(query, key, value, request.scaling, *beside)


def collects_weights() -> bool:
    """Whether a collector will pick the weights up: GPT-2 keeps the keyword that asks for them to itself."""
    collector = _collector.get()
    return collector is not None and "attentions" in collector
