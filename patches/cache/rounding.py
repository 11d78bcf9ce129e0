"""Rounds tokens on their way into a quantised cache: in one call of a kernel where one serves them, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from adaattn_hf.attention.stored import quantise
from adaattn_hf.backends.native import storing as native
from adaattn_hf.backends.order import TRITON


def write(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    *,
    mean: Tensor | None = None,
    along: Tensor | None = None,
    at: int | Tensor = 0,
) -> None:
    """Write the codes and scales of turned tokens where they belong, as `attention.stored.quantise` defines them.

    Args:
        x: `[batch, heads, n, head_dim]`, any strides.
        codes: int8 `[batch, heads, room, head_dim]`, or codes of four bits: uint8 with half the channels.
        scale: uint8 `[batch, heads, room]`.
        mean: fp32 `[batch, heads, head_dim]`, contiguous, taken off after turning.
        along: The same of length 1, the direction along which the errors of int8 codes cancel. A single token that no
            kernel serves does without, which would take many small steps.
        at: Place in the room of the first of the tokens; a 0-dim integer tensor is read on its device.
    """
    if native.serves(x):
        native.store(x, codes, scale, mean=mean, along=along, rotated=True, at=int(at))
        return
    if x.is_cuda and not TRITON.missing():
        from adaattn_hf.backends.triton import storing as triton  # imports Triton

        if triton.serves(x, codes):
            triton.store(x, codes, scale, mean=mean, along=along, at=at)
            return
    bits, count = 4 if codes.dtype is torch.uint8 else 8, x.shape[2]
    along = along if x.is_cpu or count > 1 else None
    made, scales = quantise(x, bits=bits, mean=mean, along=along)
    places = torch.arange(count, device=x.device) + at
    codes.index_copy_(2, places, made)
    scale.index_copy_(2, places, scales)


@torch.library.custom_op(
    f"{__name__.partition('.')[0]}::store_tokens",
    mutates_args=("codes", "scale"),
    schema="(Tensor x, Tensor(a!) codes, Tensor(b!) scale, Tensor? mean, Tensor? along, Tensor at) -> ()",
)
def write_at(x: Tensor, codes: Tensor, scale: Tensor, mean: Tensor | None, along: Tensor | None, at: Tensor) -> None:
    """`write` as an operator of torch, for graphs that are traced and may be captured: `at` stays on its device."""
    write(x, codes, scale, mean=mean, along=along, at=at)


@write_at.register_fake
def _write_at_fake(*_: Tensor | None) -> None:
    """Writes nothing, and has no output."""
