"""Computes the attention map of one head as a pooled image, exact or under a plan, for prompts of any length."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import some_heads
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.execute import rows_within
from adaattn_hf.stats.profile import pooled_weights

SIZE = 128
"""Largest number of rows and columns of an image; longer prompts are pooled."""


def head_map(call: AttentionCall, head: int) -> Tensor:
    """Returns the pooled weights `[rows, columns]` of one query head of the first batch row."""
    structure, q_len = call.structure, call.structure.q_len
    group = head // (call.query.shape[1] // call.key.shape[1])

    def masks() -> Iterator[Tensor]:
        for start in range(0, q_len, SIZE):
            seen = structure.visible(start, min(start + SIZE, q_len), device=call.query.device)
            yield seen[0, head if seen.shape[1] > 1 else 0]

    return pooled_weights(
        call.query[0, head],
        call.key[0, group],
        masks(),
        (SIZE, SIZE),
        scaling=call.scaling,
        softcap=call.softcap,
    )


def plan_map(call: AttentionCall, head: int, bound_layer: BoundLayer | None) -> Tensor:
    """Returns the same for what a plan computes, None being exact; ValueError for a prompt longer than it covers."""
    if bound_layer is None:
        return head_map(call, head)
    if rows_within(call.structure, bound_layer.max_length, call.query.device) is not True:
        raise ValueError(
            f"maps: the prompt has {call.structure.kv_len} tokens, and the plan speaks for {bound_layer.max_length}, "
            "behind which rows are exact; give a shorter prompt"
        )
    groups = call.query.shape[1] // call.key.shape[1]
    own = [head // groups]
    choice = bound_layer.plan.choices[own[0]]
    return head_map(choice.defined(some_heads(call, own), own, bound_layer.tensors), head % groups)
