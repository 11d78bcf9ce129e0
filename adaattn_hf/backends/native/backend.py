"""The native kernels as a backend: what they serve, and how a structure becomes their rules."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from adaattn_hf.request import AttentionRequest, AttentionResult, CallSpec
from adaattn_hf.structure import CallStructure

from . import call
from .call import Rules
from .library import missing

__all__ = ["NativeBackend", "rules_of"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NativeBackend:
    """Serves every structure on CPUs where the library has been built."""

    name = "native"

    def missing(self) -> tuple[str, ...]:
        """The library, where it was not built or cannot be loaded."""
        return missing()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """Other devices and dtypes, dropout, gradients, tracing."""
        reasons = []
        if spec.device != "cpu":
            reasons.append(f"the native kernels run on CPUs, the tensors are on {spec.device}")
        if spec.dtype not in _DTYPES:
            reasons.append(f"the native kernels have no {spec.dtype}; they have float32, bfloat16 and float16")
        if spec.dropout:
            reasons.append("the native kernels have no dropout")
        if spec.needs_grad:
            reasons.append("the native kernels have no backward for this call")
        if spec.compiling:
            reasons.append("the native kernels are not traceable for this call")
        return tuple(reasons)

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention in one call of the library, whatever the structure."""
        rules = rules_of(request.structure)
        if request.softcap is not None or request.sink_logits is not None or request.bias is not None:
            rules = with_extras(rules, request)
        out, lse = call.forward(
            request.query, request.key, request.value, request.scaling, rules, need_lse=request.need_lse
        )
        assert out is not None
        return AttentionResult(out, lse)


def rules_of(structure: CallStructure) -> Rules:
    """The rules of a structure; remembered with it, so that the layers of a forward pass share them."""
    rules: Rules | None = structure._memo.get("native")
    if rules is None:
        rules = structure._memo["native"] = _find_rules(structure)
    return rules


def _find_rules(structure: CallStructure) -> Rules:
    window = -1 if structure.window is None else structure.window
    simple = (
        structure.key_padding is None
        and structure.k_segments is None
        and structure.chunk is None
        and structure.spans is None
        and structure.mask is None
    )
    if simple:
        return Rules(structure.causal, window, structure.sinks, structure.offset())
    # sinks count from the first key of a sequence, which a run that begins at a chunk's border does not know
    runs = None if structure.chunk is not None and structure.sinks else structure.segments()
    if runs is None:
        return Rules(mask=structure.visible())
    table = torch.tensor(runs, dtype=torch.int64).reshape(-1, 6)
    return Rules(structure.causal, window, structure.sinks, segments=table)


def with_extras(rules: Rules, request: AttentionRequest) -> Rules:
    """The rules with the softcap, the learned sinks and the bias of a request."""
    bias: Tensor | None = None
    if request.bias is not None:
        bias = request.bias if request.bias.dtype in _DTYPES else request.bias.float()
        bias = bias[(None,) * (4 - bias.dim())]
        if bias.shape[3] != request.key.shape[2]:
            bias = bias.expand(*bias.shape[:3], request.key.shape[2])
    return replace(
        rules,
        softcap=request.softcap or 0.0,
        sink_logits=None if request.sink_logits is None else request.sink_logits.float().contiguous(),
        bias=bias,
    )
