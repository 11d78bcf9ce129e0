"""Rounds tokens on their way into a cache in the memory of a CPU, in one call of the library."""

import torch
from torch import Tensor

from .launch import ERRORS
from .library import DTYPES, STORE, library, loaded
from .rules import FLOATS, check_rule, pointer


def serves(x: Tensor) -> bool:
    """Whether the library is here and can round such tokens; else `adaattn_hf.attention.stored.quantise` does."""
    return x.is_cpu and x.dtype in FLOATS and library() is not None


def store(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    *,
    mean: Tensor | None = None,
    along: Tensor | None = None,
    level: int | None = None,
    at: int = 0,
) -> None:
    """Write the codes and scales of tokens where they belong, as `adaattn_hf.attention.stored.quantise` defines them.

    `x` is `[batch, heads, n, head_dim]`, of any strides; from place `at` on belong its `codes`, int8 `[batch, heads,
    room, head_dim]`, or uint8 with half the channels, four bits each, and its `scale`, uint8 `[batch, heads, room]`.
    Vectors are turned by `hadamard(head_dim)`; then a `mean` is taken off, fp32 `[batch, heads, head_dim]`. `along`,
    alike and of length 1, is the direction along which the errors of int8 codes cancel. `level` is the number of an
    instruction set, for tests, else the library's choice.

    Raises:
        RuntimeError: The library is missing, or values of four bits do not come in groups of 32 channels.
        ValueError: Codes, scales, the mean or the direction do not fit the tokens, or have no memory to read.
    """
    if x.dim() != 4 or scale.dim() != 3 or not 0 <= at <= scale.shape[2] - x.shape[2]:
        raise ValueError(
            f"scale: got shape {tuple(scale.shape)} for tokens {tuple(x.shape)} at place {at}, expected codes and "
            "scales with room for every token, [batch, heads, room, …] for [batch, heads, n, head_dim]"
        )
    *rows, _, dim = x.shape
    room = *rows, scale.shape[2]
    width, dtype = (dim // 2, torch.uint8) if codes.dtype is torch.uint8 else (dim, torch.int8)
    check_rule("x", x, x.shape, None, "strided")
    check_rule("codes", codes, (*room, width), dtype, "rows")
    check_rule("scale", scale, room, torch.uint8, "strided")
    for name, vector in (("mean", mean), ("along", along)):
        if vector is not None:
            check_rule(name, vector, (*rows, dim), torch.float32, "contiguous")
    native = loaded()
    x_at, codes_at, scale_at = x.data_ptr(), codes.data_ptr(), scale.data_ptr()
    steps, scale_steps = codes.stride(), scale.stride()
    status = native.handle.ada_store(
        STORE.pack(
            x_at, codes_at + at * steps[2], scale_at + at * scale_steps[2], pointer(mean),
            DTYPES[x.dtype], DTYPES[codes.dtype], True, *x.shape, *x.stride(), *steps, *scale_steps,
            torch.get_num_threads(), native.level if level is None else level, pointer(along),
        )
    )  # fmt: skip
    if status:
        raise RuntimeError(ERRORS[status])
