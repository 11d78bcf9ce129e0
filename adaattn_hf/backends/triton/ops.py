"""A step of generation as an operator of torch, for graphs that are traced and may be captured.

Transformers compiles the step of a static cache by itself, and captures it. Its number of tokens lies on the device
then: the host cannot look at it, but the kernel can. Registered when the package is imported, with torch only: the
kernels are imported when it first runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...attention.call import AttentionCall, head_dim_of
from ...attention.kind import format_of
from ...attention.structure import OPERANDS, MaskStructure

if TYPE_CHECKING:
    from ...attention.heads import HeadWindows

# Operators live under the name of the package that holds this file: several copies of it may be loaded.
_NAMESPACE = __name__.partition(".")[0]


@torch.library.custom_op(
    f"{_NAMESPACE}::triton_step",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sink_logits, float scaling, float? softcap, "
    "int[]? windows, SymInt? until, Tensor? key_scale, Tensor? value_scale, Tensor? key_mean, Tensor? first_key, "
    f"{OPERANDS}) -> Tensor",
)
def step_op(query: Tensor, key: Tensor, value: Tensor, *inputs: Any) -> Tensor:
    """One query per sequence, `[batch, 1, heads, head_dim_v]`.

    `windows` holds window and sinks of each head in turn, which end before position `until` of a sequence. With
    scales, key and value are the codes of a cache; see `StoredKV`.
    """
    from ...attention.stored import BITS, StoredKV
    from .step import attend_step, constants_of

    sink_logits, scaling, softcap, windows, until, key_scale, value_scale, mean, first, *operands = inputs
    structure = MaskStructure.of_operands(query, key, *operands)
    stored = None if key_scale is None else StoredKV(key_scale, value_scale, mean, first)
    call = AttentionCall(query, key, value, structure, scaling, softcap=softcap, sink_logits=sink_logits, stored=stored)
    pairs = None if windows is None else tuple(zip(windows[::2], windows[1::2], strict=True))
    bits = 0 if stored is None else BITS[format_of(value.dtype)]
    groups = query.shape[1] // key.shape[1]
    constants = constants_of(groups, query.shape[3], head_dim_of(value), query.dtype, bits, query.device)
    return attend_step(call, constants, pairs, graph=True, until=until).out


@step_op.register_fake
def _step_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    batch, heads, q_len, _d = query.shape
    return query.new_empty((batch, q_len, heads, head_dim_of(value)))


@torch.compiler.assume_constant_result
def _make_window_table(windows: HeadWindows, device: torch.device) -> bool:
    """Makes the table of windows while the graph is traced: in its memory it must not lie."""
    from .tables import window_table

    return window_table(windows, device).numel() > 0


def traced_step(call: AttentionCall) -> Tensor:
    """The step as one operator, for a graph that is being traced."""
    query, key, value, structure = call.query, call.key, call.value, call.structure
    windows: list[int] | None = None
    until = None
    if call.per_head is not None:
        from ...attention.heads import windows_and_reach

        pairs, reach = windows_and_reach(structure, call.per_head)
        if reach < structure.kv_len:
            until = call.per_head.until
            _make_window_table(pairs, query.device)
            windows = [number for pair in pairs for number in pair]
    options = call.sink_logits, call.scaling, call.softcap, windows, until
    stored = call.stored
    record: tuple[Tensor | None, ...] = (None, None, None, None)
    if stored is not None:
        record = stored.key_scale, stored.value_scale, stored.key_mean, stored.first_key
    out: Tensor = step_op(query, key, value, *options, *record, *structure.operands())
    return out
