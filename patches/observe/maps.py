"""Computes the attention map of one head as a pooled image, exact or under a plan, for prompts of any length."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.slicing import some_heads
from adaattn_hf.plans.execute import rows_within
from adaattn_hf.plans.program import Program
from adaattn_hf.stats.profile import pooled_weights

SIZE = 128
"""Largest number of rows and columns of an image; longer prompts are pooled."""


def head_map(request: AttentionRequest, head: int) -> Tensor:
    """Returns the pooled weights `[rows, columns]` of one query head of the first batch row."""
    structure, q_len = request.structure, request.structure.q_len
    group = head // (request.query.shape[1] // request.key.shape[1])

    def masks() -> Iterator[Tensor]:
        for start in range(0, q_len, SIZE):
            seen = structure.visible(start, min(start + SIZE, q_len), device=request.query.device)
            yield seen[0, head if seen.shape[1] > 1 else 0]

    return pooled_weights(
        request.query[0, head],
        request.key[0, group],
        masks(),
        (SIZE, SIZE),
        scaling=request.scaling,
        softcap=request.softcap,
    )


def plan_map(request: AttentionRequest, head: int, program: Program | None) -> Tensor:
    """Returns the same for what a plan computes, None being exact; ValueError for a prompt longer than it covers."""
    if program is None:
        return head_map(request, head)
    if rows_within(request.structure, program.max_length, request.query.device) is not True:
        raise ValueError(
            f"maps: the prompt has {request.structure.kv_len} tokens, and the plan speaks for {program.max_length}, "
            "behind which rows are exact; give a shorter prompt"
        )
    groups = request.query.shape[1] // request.key.shape[1]
    own = [head // groups]
    choice = program.plan.choices[own[0]]
    return head_map(choice.defined(some_heads(request, own), own, program.tensors), head % groups)
