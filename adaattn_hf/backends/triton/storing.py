"""Rounds tokens on their way into a quantised cache on a CUDA device: one kernel for what torch does in dozens."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.stored import CHANNELS, FULL
from .decode import turned
from .launch import Launcher, aligned, device_facts
from .tiling import padded

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST = 256
_TOKENS = 4
"""Tokens and warps of a program that writes several."""
_FULL = tl.constexpr(FULL)


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


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scale_ptr, mean_ptr, along_ptr, x_b, x_h, x_n, x_d, codes_b, codes_h, codes_n,
    scale_b, scale_h, scale_n, heads, at, count,
    DIM: tl.constexpr, PADDED: tl.constexpr, BITS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_ALONG: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Codes and scales of `TOKENS` tokens of one head, as `attention.stored.quantise` defines them."""
    row = tl.program_id(1)
    b, h = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    n = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    d = tl.arange(0, PADDED)
    valid = n < count
    source = x_ptr + b * x_b + h * x_h + n[:, None] * x_n
    x = tl.load(source + d[None] * x_d, valid[:, None] & (d < DIM)[None], 0.0).to(tl.float32)
    x = turned(x, PADDED, DIM & -DIM)
    beside = row.to(tl.int64) * DIM + d
    if HAS_MEAN:
        x -= tl.load(mean_ptr + beside, d < DIM, 0.0)[None]
    peak = tl.max(tl.abs(x), 1) * (1 / 127 if BITS == 8 else 1 / 15)
    # the smallest scale of eight bits that is not below: `attention.stored.encode_scale`
    code = (peak.to(tl.int32, bitcast=True) - (107 << 23) + (1 << 20) - 1) >> 20
    code = tl.minimum(tl.maximum(code, 0), 255)
    tl.store(scale_ptr + b * scale_b + h * scale_h + (at + n) * scale_n, code.to(tl.uint8), valid)
    steps = x * (1.0 / ((code << 20) + (107 << 23)).to(tl.float32, bitcast=True))[:, None]
    code_ptrs = codes_ptr + b * codes_b + h * codes_h + (at + n[:, None]) * codes_n
    if BITS == 8:
        codes = tl.minimum(tl.maximum(_round(steps), -127.0), 127.0)
        if HAS_ALONG:
            along = tl.load(along_ptr + beside, d < DIM, 0.0)[None]
            codes = _cancelled(codes, steps, along, d[None], DIM)
        tl.store(code_ptrs + d[None], codes.to(tl.int8), valid[:, None] & (d < DIM)[None])
    else:
        halves = tl.minimum(tl.maximum(_round((steps + 15) * 0.5), 0.0), 15.0).to(tl.int32)
        low, high = tl.split(halves.reshape(TOKENS, PADDED // (2 * GROUP), 2, GROUP).permute(0, 1, 3, 2))
        packed = (low | (high << 4)).reshape(TOKENS, PADDED // 2)
        half = tl.arange(0, PADDED // 2)[None]
        tl.store(code_ptrs + half, packed.to(tl.uint8), valid[:, None] & (half < DIM // 2))


@Launcher
@triton.jit(do_not_specialize=["at", "count", "room", "slots", "sinks"])
def store_tokens(  # type: ignore[no-untyped-def]
    k_ptr, k_codes_ptr, k_scale_ptr, v_ptr, v_codes_ptr, v_scale_ptr, mean_ptr, along_ptr, held_ptr,
    k_b, k_h, k_n, k_d, kc_b, kc_h, kc_n, ks_b, ks_h, ks_n, v_b, v_h, v_n, v_d, vc_b, vc_h, vc_n, vs_b, vs_h, vs_n,
    heads, at, count, room, slots, sinks,
    DIM: tl.constexpr, PADDED: tl.constexpr, DIM_V: tl.constexpr, PADDED_V: tl.constexpr, BITS: tl.constexpr,
    HAS_MEAN: tl.constexpr, HAS_ALONG: tl.constexpr, COUNTS: tl.constexpr, RING: tl.constexpr, TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Tokens of one head of one batch row: keys by the first programs of the third extent, values by the second ones.

    COUNTS: the first place is the number of tokens held, which is read and raised. While programs are under way its
    upper half counts those that have read it. RING: it is that of those that came, of which one more is written; behind
    the `sinks` first ones they go round the `slots`.
    """
    if COUNTS:
        held = tl.load(held_ptr) & 0xFFFFFFFF
        tl.device_assert(held + count <= room, _FULL)
        count = tl.minimum(count, room - held)
        at = held
        if RING:
            at = tl.where(held < slots, held, sinks + (held - sinks) % (slots - sinks))
    if tl.program_id(2) == 0:
        _store(
            k_ptr, k_codes_ptr, k_scale_ptr, mean_ptr, along_ptr, k_b, k_h, k_n, k_d, kc_b, kc_h, kc_n,
            ks_b, ks_h, ks_n, heads, at, count, DIM, PADDED, 8, HAS_MEAN, HAS_ALONG, TOKENS, GROUP,
        )  # fmt: skip
    else:
        _store(
            v_ptr, v_codes_ptr, v_scale_ptr, mean_ptr, along_ptr, v_b, v_h, v_n, v_d, vc_b, vc_h, vc_n,
            vs_b, vs_h, vs_n, heads, at, count, DIM_V, PADDED_V, BITS, False, False, TOKENS, GROUP,
        )  # fmt: skip
    if COUNTS:
        tl.debug_barrier()  # every thread has read before one thread says so
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        if tl.atomic_add(held_ptr, 1 << 32, sem="acq_rel") >> 32 == programs - 1:
            tl.store(held_ptr, held + count)


def serves(x: Tensor, codes: Tensor) -> bool:
    """Whether the kernel can round such tokens; else `adaattn_hf.attention.stored.quantise` does."""
    fours = codes.dtype is torch.uint8
    if x.dtype not in _DTYPES or x.shape[3] > _LARGEST or (fours and x.shape[3] % CHANNELS):
        return False
    return not x.is_cuda or device_facts(x.device).compiles


def store(
    keys: Tensor,
    values: Tensor | None,
    parts: Sequence[Tensor],
    *,
    mean: Tensor | None = None,
    along: Tensor | None = None,
    at: int | Tensor = 0,
    ring: tuple[int, int] | None = None,
) -> None:
    """Write the codes and scales of turned tokens where they belong, as `attention.stored.quantise` defines them.

    Args:
        keys, values: `[batch, heads, n, head_dim]`, any strides; None where only keys are written.
        parts: Codes of keys, int8 `[batch, heads, room, head_dim]`, and their scales, uint8 `[batch, heads, room]`; the
            same of values, whose codes of four bits are uint8 with half the channels.
        mean: fp32 `[batch, heads, head_dim]`, contiguous, taken off keys after turning.
        along: The same of length 1, the direction along which the errors of int8 keys cancel.
        at: Place in the room of the first of the tokens. A 0-dim int64 tensor counts those held: the kernel reads and
            raises it.
        ring: Where it counts those that came, for one token: how many of the first ones stay where they are while the
            room behind them is used again and again, and how many may come.
    """
    batch, heads, count, dim = keys.shape
    tensors = (keys, *parts[:2], *((keys, *parts[:2]) if values is None else (values, *parts[2:])))
    dim_v = tensors[3].shape[3]
    counter, at = (at, 0) if isinstance(at, Tensor) else (None, at)
    k, k_codes, k_scale, v, v_codes, v_scale = (tensor.stride() for tensor in tensors)
    numbers = *k, *k_codes[:3], *k_scale, *v, *v_codes[:3], *v_scale, heads
    tokens = 1 if count == 1 else _TOKENS
    constants = {
        "DIM": dim, "PADDED": padded(dim), "DIM_V": dim_v, "PADDED_V": padded(dim_v),
        "BITS": 4 if tensors[4].dtype is torch.uint8 else 8,
        "HAS_MEAN": mean is not None, "HAS_ALONG": along is not None,
        "COUNTS": counter is not None, "RING": ring is not None, "TOKENS": tokens, "GROUP": CHANNELS // 2,
        "num_warps": tokens, "debug": counter is not None, "sanitize_overflow": False,
    }  # fmt: skip
    optional = tuple(keys if tensor is None else tensor for tensor in (mean, along, counter))
    kind = (*(tensor.dtype for tensor in tensors), numbers) if aligned(*tensors, *optional) else None
    grid = triton.cdiv(count, tokens), batch * heads, 1 if values is None else 2
    slots = parts[0].shape[2]
    sinks, room = ring or (0, slots)
    store_tokens(grid, (*tensors, *optional, *numbers, at, count, room, slots, sinks), constants, kind)
