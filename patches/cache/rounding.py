"""Rounds tokens on their way into a quantised cache: in one call of a kernel where one serves them, else by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adaattn_hf.attention.stored import FULL, quantise
from adaattn_hf.backends.native import storing as native
from adaattn_hf.backends.order import TRITON


def write(
    keys: Tensor,
    values: Tensor | None,
    parts: Sequence[Tensor],
    *,
    mean: Tensor | None = None,
    along: Tensor | None = None,
    at: int | Tensor = 0,
) -> None:
    """Write the codes and scales of turned tokens where they belong, as `attention.stored.quantise` defines them.

    The arguments are those of `backends.triton.storing.store`. A single token that no kernel serves does without
    `along`, which would take many small steps.
    """
    if keys.is_cuda and not TRITON.missing():
        from adaattn_hf.backends.triton import storing as triton  # imports Triton

        if triton.serves(keys, parts[0]) and (values is None or triton.serves(values, parts[2])):
            triton.store(keys, values, parts, mean=mean, along=along, at=at)
            return
    count = keys.shape[2]
    if isinstance(at, Tensor):
        torch._assert_async(at + count <= parts[0].shape[2], FULL)
    _write(keys, parts[0], parts[1], mean, along, at)
    if values is not None:
        _write(values, parts[2], parts[3], None, None, at)
    if isinstance(at, Tensor):
        at.add_(count)


def _write(
    x: Tensor, codes: Tensor, scale: Tensor, mean: Tensor | None, along: Tensor | None, at: int | Tensor
) -> None:
    if native.serves(x):
        native.store(x, codes, scale, mean=mean, along=along, rotated=True, at=int(at))
        return
    bits, count = 4 if codes.dtype is torch.uint8 else 8, x.shape[2]
    made, scales = quantise(x, bits=bits, mean=mean, along=along if x.is_cpu or count > 1 else None)
    places = torch.arange(count, device=x.device) + at
    codes.index_copy_(2, places, made)
    scale.index_copy_(2, places, scales)


@torch.library.custom_op(
    f"{__name__.partition('.')[0]}::store_tokens",
    mutates_args=("key_codes", "key_scale", "value_codes", "value_scale", "held"),
    schema="(Tensor keys, Tensor values, Tensor(a!) key_codes, Tensor(b!) key_scale, Tensor(c!) value_codes, "
    "Tensor(d!) value_scale, Tensor? mean, Tensor? along, Tensor(e!) held) -> ()",
)
def append(keys: Tensor, values: Tensor, *inputs: Any) -> None:
    """`write` as an operator of torch, for graphs that are traced and may be captured: `held` counts on its device."""
    *parts, mean, along, held = inputs
    write(keys, values, parts, mean=mean, along=along, at=held)


@append.register_fake
def _append_fake(*_: Tensor | None) -> None:
    """Writes nothing, and has no output."""
