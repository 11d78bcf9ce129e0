"""Attention through `torch.nn.functional.scaled_dot_product_attention`, one call per piece of the structure."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..request import AttentionRequest, AttentionResult, CallSpec

__all__ = ["SdpaBackend"]

# Rows of a boolean band that is built at a time where a structure is not made of runs: bounds the mask's memory.
BAND = 512


class SdpaBackend:
    """Serves every structure on every device; says no to what the operator cannot express."""

    name = "sdpa"

    def missing(self) -> tuple[str, ...]:
        """Needs torch alone."""
        return ()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """Softcap, learned sinks and the log-sum-exp are not part of the operator."""
        reasons = []
        if spec.softcap:
            reasons.append("scaled_dot_product_attention has no softcap")
        if spec.sink_logits:
            reasons.append("scaled_dot_product_attention has no learned sinks")
        if spec.need_lse:
            reasons.append("scaled_dot_product_attention does not return the log-sum-exp")
        return tuple(reasons)

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention by as few operator calls as the structure allows."""
        structure = request.structure
        query, key, value = request.query, request.key, request.value
        kind = structure.kind
        if request.bias is None and kind in ("full", "causal"):
            return AttentionResult(_call(request, query, key, value, causal=kind == "causal").transpose(1, 2))
        if request.bias is None and structure.plain and structure.q_len == 1 and not structure.windowed:
            stop = structure.kv_len if not structure.causal else min(structure.kv_len, structure.offset() + 1)
            out = _call(request, query, key[:, :, :stop], value[:, :, :stop], causal=False)
            return AttentionResult(out.transpose(1, 2))
        return AttentionResult(_bands(request).transpose(1, 2))


def _call(
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """One operator call; heads are grouped by the operator where it can, repeated where it cannot."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=request.dropout,
        is_causal=causal,
        scale=request.scaling,
        enable_gqa=groups > 1,
    )


def _bands(request: AttentionRequest) -> Tensor:
    """Any structure, exactly: bands of query rows against all keys, each with its own mask."""
    structure, query = request.structure, request.query
    step = structure.q_len if torch.compiler.is_compiling() else BAND
    outs = []
    for start in range(0, structure.q_len, step):
        stop = min(start + step, structure.q_len)
        mask = structure.visible(start, stop, device=query.device)
        if request.bias is not None:
            bias = request.bias if request.bias.shape[2] == 1 else request.bias[:, :, start:stop]
            mask = bias.to(query.dtype).masked_fill(~mask, float("-inf"))
        outs.append(_call(request, query[:, :, start:stop], request.key, request.value, mask=mask))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
