"""The fast path for small calls: a structure remembers the backend call that was chosen for it.

A small call spends more time in Python than in its kernel. All layers of a forward pass share one structure through
the mask, so the first layer chooses a backend and the others reuse its choice. Structures without tensors are also kept
for later forward passes with the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.attention.tap import NOBODY, listening
from adaattn_hf.attention.tap import tracing as tracing
from adaattn_hf.backends.base import Backend, FastCall, facts_of, spec_of
from adaattn_hf.backends.select import choose

from .families import HARMLESS, loses_borders

if TYPE_CHECKING:
    from adaattn_hf.attention.stored import StoredKV

IDLE = {*HARMLESS, "position_ids"}
"""Keywords that change no call. `position_ids` do in some model families; calls of those are not remembered. Options of
losses join when they are first met."""

MOST = 64
"""Most structures that are kept; every step of a decode adds one, since its keys are one more."""

_structures: dict[Hashable, CallStructure] = {}

recall = _structures.get

_collector = output_capturing._active_collector
_casts = torch._C._is_any_autocast_enabled


def remember(key: Hashable, structure: CallStructure) -> None:
    """Keeps a structure under a key that holds everything it was made from."""
    if len(_structures) >= MOST:
        _structures.clear()
    _structures[key] = structure


class Ready(NamedTuple):
    """A remembered call, and the conditions under which it may be repeated.

    Attributes:
        config: Configuration of the attention module that made the call.
        fields: The configuration's `__dict__`, which must still hold the same settings of this package, or none.
        facts: Result of `facts_of`.
        settings: These settings as the configuration holds them; None without.
        attend: A `FastCall`, or a function that takes module and structure before what a `FastCall` takes:
            `ExactCall.attend`, with settings `planned_call.PlannedCall.attend`.
        bare: Whether it is a `FastCall`.
    """

    config: Any
    fields: Mapping[str, Any]
    facts: tuple[Hashable, ...]
    settings: Any
    attend: Callable[..., Any]
    bare: bool


class ExactCall(NamedTuple):
    """An exact call by the backend that was chosen for it, by its fast call if it has one.

    The structure is passed in, for it is the structure that keeps the call: tensors in a circle would outlive the pass.
    """

    backend: Backend
    fast: FastCall | None

    @classmethod
    def of(cls, request: AttentionRequest, forced: str | None) -> ExactCall:
        """Chooses the backend for calls like this one."""
        spec = spec_of(request, forced)
        backend = choose(spec, forced)
        return cls(backend, backend.fast_call(spec, request))

    def attend(
        self,
        module: nn.Module,
        structure: CallStructure,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        *stored: StoredKV,
    ) -> Tensor:
        """Returns the output `[batch, q_len, heads, head_dim_v]`; which module calls changes nothing."""
        if self.fast is not None:
            return self.fast(query, key, value, scaling, *stored)
        record = stored[0] if stored else None
        request = AttentionRequest(query, key, value, structure.settled(), scaling, stored=record)
        return self.backend.attend(request).out


def structure_at_hand(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    is_causal: bool | None,
    sliding_window: int | None,
) -> CallStructure | None:
    """Returns the structure of a call without a mask if an earlier call has made it, else None."""
    if attention_mask is not None or sliding_window is not None or not query.dim() == key.dim() == 4:
        return None
    return recall(maskless(module, query.shape, key.shape, is_causal))


def maskless(
    module: nn.Module, q_shape: torch.Size, k_shape: torch.Size, is_causal: bool | None
) -> tuple[int, int, int, bool]:
    """Returns batch, query length, key length and causality of a call without a mask.

    As in stock attention, causality then counts from the first key, and a single query sees all keys.
    """
    batch, _, q_len, _ = q_shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    return batch, q_len, k_shape[2], bool(causal) and q_len > 1


def undisturbed(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether only the tensors can change the call: no autocast, keyword, listener or collector of weights."""
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
    """Computes attention and remembers the call with `structure`, for the layers that follow."""
    query, key, value = request.query, request.key, request.value
    beside = () if request.stored is None else (request.stored,)

    facts = facts_of(backend, query, key, value, request.stored is not None)
    # kept apart from `structure.ready`: models with other configurations may share the structure
    call = request.structure.cached(("call", forced, facts), lambda: ExactCall.of(request, forced))
    bare = call.fast is not None
    same = bare or request.structure is structure.settled()
    if same and undisturbed(module, kwargs) and not loses_borders(config):
        fields = {} if config is None else object.__getattribute__(config, "__dict__")
        structure.ready = Ready(config, fields, facts, None, call.fast or call.attend, bare)
    return call.attend(module, request.structure, query, key, value, request.scaling, *beside)


def collects_weights() -> bool:
    """Whether Transformers collects attention weights by hooks; GPT-2 does not pass `output_attentions` on."""
    collector = _collector.get()
    return collector is not None and "attentions" in collector
