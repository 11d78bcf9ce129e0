"""One call of the native kernels for all heads of a precision: windows and sinks per key/value head.

Where the native backend serves a call, exact and windowed heads of one precision share a launch, and bfloat16
is computed from fp32 tensors without a copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from adaattn_hf.backends.native import call
from adaattn_hf.backends.native.backend import NativeBackend
from adaattn_hf.backends.native.rules import rules_of, with_extras
from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.plan import Choice
from adaattn_hf.request import AttentionRequest, AttentionResult, CallSpec

PRECISIONS = ("model", "bf16")
"""Precisions of products that the kernels have for fp32 tensors."""


def serves(request: AttentionRequest, backend: str | None) -> bool:
    """Whether the native kernels may take the launches of this request."""
    native = BACKENDS.get("native")
    if not isinstance(native, NativeBackend) or backend not in (None, "native") or native.missing():
        return False
    spec = CallSpec.of(request)
    if spec.needs_grad or spec.compiling or native.refusals(spec):
        return False
    structure = request.structure
    return structure.chunk is None and rules_of(structure).mask is None


def takes(choice: Choice) -> bool:
    """Whether a choice can share a native launch with others of its precision."""
    return choice.kind != "blocks" and choice.rank == 0 and choice.precision in PRECISIONS


def attend(request: AttentionRequest, choices: Sequence[Choice], precision: str) -> AttentionResult:
    """Returns the attention of heads of one precision, each with its own window.

    Args:
        request: The request of these heads alone.
        choices: One per key/value head, of kind exact or window.
        precision: Precision of the products; see `PRECISIONS`.
    """
    rules = rules_of(request.structure)
    own = request.structure.window
    windows, sinks = [], []
    for choice in choices:
        narrower = choice.kind == "window" and (own is None or choice.window < own)
        windows.append(choice.window if narrower else (-1 if own is None else own))
        sinks.append(choice.sinks if narrower and own is None else request.structure.sinks)
    rules = replace(
        rules,
        head_windows=torch.tensor(windows, dtype=torch.int64),
        head_sinks=torch.tensor(sinks, dtype=torch.int64),
        compute=precision if request.query.dtype == torch.float32 else "model",
    )
    if request.softcap is not None or request.sink_logits is not None or request.bias is not None:
        rules = with_extras(
            rules, request.bias, request.sink_logits, request.softcap or 0.0, request.key.shape[2]
        )
    out, lse = call.forward(
        request.query, request.key, request.value, request.scaling, rules, need_lse=request.need_lse
    )
    if out is None:
        raise RuntimeError(
            "the native kernels returned no output; rebuild them with python -m adaattn_hf.backends.native"
        )
    return AttentionResult(out, lse)
