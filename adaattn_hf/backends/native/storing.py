"""Rounds tokens on their way into a cache in the memory of a CPU, in one call of the library."""

from __future__ import annotations

import torch
from torch import Tensor

from .entry import error_of
from .guard import FLOATS, lies
from .library import DTYPES, STORE, library, loaded

_CODES = (torch.int8, torch.uint8)


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
    rotated: bool = True,
    level: int | None = None,
    at: int = 0,
) -> None:
    """Write the codes and scales of tokens where they belong, as `adaattn_hf.attention.stored.quantise` defines them.

    Args:
        x: `[batch, heads, n, head_dim]`, any strides.
        codes: int8 `[batch, heads, room, head_dim]`, or codes of four bits: uint8 with half the channels.
        scale: uint8 `[batch, heads, room]`.
        mean: fp32 `[batch, heads, head_dim]`, contiguous, taken off after turning.
        along: The same of length 1, the direction along which the errors of int8 codes cancel.
        rotated: Turn by `hadamard(head_dim)` first.
        level: Number of an instruction set, for tests; the library's own choice when None.
        at: Place in the room of the first of the tokens.

    Raises:
        RuntimeError: The library is missing, or values of four bits do not come in groups of 32 channels.
        ValueError: Codes, scales or the mean do not fit the tokens.
    """
    shape, room, dim = x.shape, scale.shape, x.shape[-1] if x.dim() else 0
    fits = len(shape) == 4 and len(room) == 3 and 0 <= at <= room[2] - shape[2]
    if fits:
        beside = *shape[:2], dim
        fits = (
            room[:2] == shape[:2]
            and codes.shape == (*room, dim // 2 if codes.dtype is torch.uint8 else dim)
            and codes.dtype in _CODES
            and codes.stride(3) == 1
            and scale.dtype is torch.uint8
            and x.dtype in FLOATS
            and (mean is None or _belongs(mean, beside))
            and (along is None or _belongs(along, beside))
        )
    if not fits or not all(_in_memory(t) for t in (x, codes, scale)):
        tensors = [t for t in (x, codes, scale, mean, along) if t is not None]
        raise ValueError(
            f"codes, scale, mean: got {[(tuple(t.shape), t.dtype, t.device.type) for t in tensors]} for tokens first, "
            f"and place {at}, expected codes and scales with room for every token, and a contiguous mean in fp32, in "
            "the memory of the CPU"
        )
    native = loaded()
    x_at, codes_at, scale_at = x.data_ptr(), codes.data_ptr(), scale.data_ptr()
    steps, scale_steps = codes.stride(), scale.stride()
    status = native.handle.ada_store(
        STORE.pack(
            x_at, codes_at + at * steps[2], scale_at + at * scale_steps[2], 0 if mean is None else mean.data_ptr(),
            DTYPES[x.dtype], DTYPES[codes.dtype], rotated, *shape, *x.stride(), *steps, *scale_steps,
            torch.get_num_threads(), native.level if level is None else level,
            0 if along is None else along.data_ptr(),
        )
    )  # fmt: skip
    if status:
        raise error_of(status)


def _belongs(t: Tensor, extents: tuple[int, ...]) -> bool:
    return t.shape == extents and t.dtype is torch.float32 and t.is_contiguous() and _in_memory(t)


def _in_memory(t: Tensor) -> bool:
    if lies(t):
        return True
    plain = type(t) is Tensor and t.layout == torch.strided and t.is_cpu
    plain = plain and not (t.is_neg() or t._is_zerotensor())
    return plain and bool(not t.numel() or t.untyped_storage().data_ptr())
