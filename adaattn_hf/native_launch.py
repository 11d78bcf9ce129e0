"""One call of the native kernels for all heads of a precision: windows, sinks and kept blocks per key/value head.

Where the native backend serves a call, exact and windowed heads of one precision share a launch, and bfloat16
and int8 products are computed from the call's own tensors, without a copy of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from adaattn_hf.approximate import blocks_apply, picked_blocks
from adaattn_hf.backends.native import call
from adaattn_hf.backends.native.backend import NativeBackend
from adaattn_hf.backends.native.library import library
from adaattn_hf.backends.native.rules import rules_of, with_extras
from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.plan import BLOCK, Choice
from adaattn_hf.request import AttentionRequest, AttentionResult, CallSpec


def precisions() -> tuple[str, ...]:
    """Returns the precisions of products that the kernels have on this machine, for tensors of any dtype."""
    found = library()
    if found is None:
        return ()
    return ("model", "bf16", "int8") if found.level_name == "avx512_bf16" else ("model", "bf16")


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
    return choice.rank == 0 and choice.precision in precisions()


def name(choice: Choice, few: bool = False) -> str:
    """Returns the name of the native launch that serves a choice; choices of one name share it.

    Args:
        choice: A choice that `takes` accepts.
        few: Whether the call has so few query rows that products are in the model's precision.
    """
    return f"native{' blocks' * (choice.kind == 'blocks')} {'model' if few else choice.precision}"


def attend(
    request: AttentionRequest, choices: Sequence[Choice], precision: str, key_mean: Tensor | None = None
) -> AttentionResult:
    """Returns the attention of heads of one precision, each with its own window or its own blocks.

    Args:
        request: The request of these heads alone.
        choices: One per key/value head, all of kind blocks or none.
        precision: Precision of the products; see `precisions`.
        key_mean: `[num_kv_heads, head_dim]` of these heads, taken off the keys before they are rounded to int8.
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
        keep=kept_blocks(request, choices) if choices[0].kind == "blocks" else None,
        compute=precision if precision == "int8" or request.query.dtype == torch.float32 else "model",
        key_mean=None if key_mean is None or precision != "int8" else key_mean.float().contiguous(),
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


def kept_blocks(request: AttentionRequest, choices: Sequence[Choice]) -> Tensor | None:
    """Returns the boolean `[batch, num_kv_heads, q_len, blocks]` of blocks that each row keeps, None where all are.

    Selected as `approximate.block_mask` defines it, which must be true row by row: a row's blocks follow from its
    query and from keys at or before it.
    """
    runs = blocks_apply(request)
    if runs is None:
        return None
    query, key = request.query, request.key
    blocks = max((-(-run.k_len // BLOCK) for run in runs), default=0)
    if rules_of(request.structure).segments is None:
        blocks = -(-key.shape[2] // BLOCK)
    keep = torch.zeros(query.shape[0], key.shape[1], query.shape[2], blocks, dtype=torch.bool)
    for run in runs:
        rows = slice(run.q_start, run.q_start + run.q_len)
        for choice in dict.fromkeys(choices):
            heads = [head for head, own in enumerate(choices) if own == choice]
            picked = picked_blocks(request, run, choice, heads)
            keep[run.row, heads, rows, : picked.shape[2]] = picked
    return keep
