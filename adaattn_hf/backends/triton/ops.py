"""A step of generation as an operator of torch, for graphs that are traced and may be captured.

Transformers compiles the step of a static cache by itself, and captures it. Its number of tokens lies on the device
then: the host cannot look at it, but the kernel can. Registered when the package is imported, with torch only: the
kernels are imported when it first runs.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...attention.call import NAMESPACE, OPERANDS, AttentionCall, empty_output, head_dim_of
from ...attention.kind import BITS, format_of

if TYPE_CHECKING:
    from ...attention.heads import HeadWindows


@torch.library.custom_op(
    f"{NAMESPACE}::triton_step", mutates_args=(), schema=f"({OPERANDS}, int[]? windows, SymInt? until) -> Tensor"
)
def step_op(*inputs: Any) -> Tensor:
    """One query per sequence, `[batch, 1, heads, head_dim_v]`.

    `windows` holds window and sinks of each head in turn, which end before position `until` of a sequence. With
    scales, key and value are the codes of a cache; see `StoredKV`.
    """
    from .step import attend_step, constants_of

    *operands, windows, until = inputs
    call = AttentionCall.of_operands(*operands)
    query, key, value = call.query, call.key, call.value
    pairs = None if windows is None else tuple(zip(windows[::2], windows[1::2], strict=True))
    bits = 0 if call.stored is None else BITS[format_of(value.dtype)]
    groups = query.shape[1] // key.shape[1]
    constants = constants_of(groups, query.shape[3], head_dim_of(value), query.dtype, bits, query.device)
    return attend_step(call, constants, pairs, graph=True, until=until).out


step_op.register_fake(empty_output)


@torch.compiler.assume_constant_result
def _make_window_table(windows: "HeadWindows", device: torch.device) -> bool:
    """Makes the table of windows while the graph is traced: in its memory it must not lie."""
    from .tables import window_table

    return window_table(windows, device).numel() > 0


def traced_step(call: AttentionCall) -> Tensor:
    """The step as one operator, for a graph that is being traced."""
    windows: list[int] | None = None
    until = None
    if call.per_head is not None:
        from ...attention.heads import windows_and_reach

        pairs, reach = windows_and_reach(call.structure, call.per_head)
        if reach < call.structure.kv_len:
            until = call.per_head.until
            _make_window_table(pairs, call.query.device)
            windows = [number for pair in pairs for number in pair]
    out: Tensor = step_op(*call.operands(), windows, until)
    return out
