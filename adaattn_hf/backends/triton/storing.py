"""Rounds tokens on their way into a quantised cache on a CUDA device: one kernel for what torch does in dozens."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.stored import CHANNELS, hadamard
from ..capability import capability
from .launcher import Launcher, aligned
from .sizes import LEAST_SM

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = 256
_TOKENS = 16
"""Tokens of a program; the least rows that a product on matrix units may have."""
_STEP = 16
"""Rows of the matrix that turns them which are read at once."""


@triton.jit
def _round(x):  # type: ignore[no-untyped-def]
    """The nearest whole number, halves to even: fp32 beyond 1.5 * 2^23 has no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _cancelled(codes, steps, along, channel, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `attention.stored.cancelled`: up to three codes of a token are rounded the other way."""
    for _ in tl.static_range(3):
        error = codes - steps
        off = tl.sum(error * along, 1)[:, None]
        sign = tl.where(error > 0, 1.0, -1.0)
        moved = off - sign * along
        cost = DIM / 2 * (moved * moved - off * off) + 1 - 2 * tl.abs(error)
        cost = tl.where((tl.abs(codes - sign) > 127) | (channel >= DIM), float("inf"), cost)
        chosen = (channel == tl.argmin(cost, 1)[:, None]) & (cost < 0)
        codes = tl.where(chosen, codes - sign, codes)
    return codes


@triton.jit(do_not_specialize=["at", "count"])
def store_tokens(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scale_ptr, turn_ptr, mean_ptr, along_ptr, x_b, x_h, x_n, x_d, codes_b, codes_h, codes_n,
    scale_b, scale_h, scale_n, heads, at, place_ptr, count,
    DIM: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_ALONG: tl.constexpr,
    HAS_PLACE: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Codes and scales of `TOKENS` tokens of one head, as `attention.stored.quantise` defines them."""
    if HAS_PLACE:
        at = tl.load(place_ptr)
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    n = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    d = tl.arange(0, PADDED)
    there = n < count
    source = x_ptr + b * x_b + h * x_h + n[:, None] * x_n
    x = tl.zeros((TOKENS, PADDED), tl.float32)
    for first in tl.static_range(0, PADDED, STEP):  # the whole matrix is more than shared memory holds
        inner = first + tl.arange(0, STEP)
        some = tl.load(source + inner[None] * x_d, there[:, None] & (inner < DIM)[None], 0.0).to(tl.float32)
        turn = tl.load(turn_ptr + inner[:, None] * DIM + d[None], (inner < DIM)[:, None] & (d < DIM)[None], 0.0)
        x += tl.dot(some, turn, input_precision="ieee")
    beside = row.to(tl.int64) * DIM + d
    if HAS_MEAN:
        x -= tl.load(mean_ptr + beside, d < DIM, 0.0)[None]
    peak = tl.max(tl.abs(x), 1) * (1 / 127 if BITS == 8 else 1 / 15)
    # the smallest scale of eight bits that is not below: `attention.stored.encode_scale`
    code = (peak.to(tl.int32, bitcast=True) - (107 << 23) + (1 << 20) - 1) >> 20
    code = tl.minimum(tl.maximum(code, 0), 255)
    tl.store(scale_ptr + b * scale_b + h * scale_h + (at + n) * scale_n, code.to(tl.uint8), there)
    steps = x * (1.0 / ((code << 20) + (107 << 23)).to(tl.float32, bitcast=True))[:, None]
    there_ptr = codes_ptr + b * codes_b + h * codes_h + (at + n[:, None]) * codes_n
    if BITS == 8:
        codes = tl.minimum(tl.maximum(_round(steps), -127.0), 127.0)
        if HAS_ALONG:
            along = tl.load(along_ptr + beside, d < DIM, 0.0)[None]
            codes = _cancelled(codes, steps, along, d[None], DIM)
        tl.store(there_ptr + d[None], codes.to(tl.int8), there[:, None] & (d < DIM)[None])
    else:
        halves = tl.minimum(tl.maximum(_round((steps + 15) * 0.5), 0.0), 15.0).to(tl.int32)
        low, high = tl.split(halves.reshape(TOKENS, PADDED // (2 * GROUP), 2, GROUP).permute(0, 1, 3, 2))
        packed = (low | (high << 4)).reshape(TOKENS, PADDED // 2)
        half = tl.arange(0, PADDED // 2)[None]
        tl.store(there_ptr + half, packed.to(tl.uint8), there[:, None] & (half < DIM // 2))


launch_store = Launcher(store_tokens)


@functools.cache
def _multiplies(device: torch.device) -> bool:
    """Whether a device has the matrix units that the kernel turns tokens on; asked of a cache for every token."""
    facts = capability(device)
    return facts is None or facts.sm >= LEAST_SM


def serves(x: Tensor, codes: Tensor) -> bool:
    """Whether the kernel can round such tokens; else `adaattn_hf.attention.stored.quantise` does."""
    fours = codes.dtype is torch.uint8
    if x.dtype not in _DTYPES or x.shape[3] > _LARGEST or (fours and x.shape[3] % CHANNELS):
        return False
    return not x.is_cuda or _multiplies(x.device)


def store(
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
        along: The same of length 1, the direction along which the errors of int8 codes cancel.
        at: Place in the room of the first of the tokens; a 0-dim int64 tensor is read by the kernel.
    """
    batch, heads, count, dim = x.shape
    turn = hadamard(dim, x.device)
    mean, has_mean = (turn, False) if mean is None else (mean, True)
    along, has_along = (turn, False) if along is None else (along, True)
    place, at = (at, 0) if isinstance(at, Tensor) else (None, at)
    numbers = (*x.stride(), *codes.stride()[:3], *scale.stride(), heads)
    constants = {
        "DIM": dim, "PADDED": max(16, triton.next_power_of_2(dim)), "BITS": 4 if codes.dtype is torch.uint8 else 8,
        "HAS_MEAN": has_mean, "HAS_ALONG": has_along, "HAS_PLACE": place is not None,
        "TOKENS": _TOKENS, "GROUP": CHANNELS // 2, "STEP": _STEP,
    }  # fmt: skip
    tensors = (x, codes, scale, turn, mean, along)
    kind = (x.dtype, numbers) if x.is_cuda and aligned(*tensors, place) else None
    grid = triton.cdiv(count, _TOKENS), batch * heads
    launch_store(grid, (*tensors, *numbers, at, turn if place is None else place, count), constants, kind)
