"""Rounding tokens on their way into a cache: in one call of the library where it runs, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.stored import quantise
from .call import _ERRORS
from .guard import lies
from .library import DTYPES, STORE, library, missing

__all__ = ["store", "write"]

_NATIVE = (torch.float32, torch.bfloat16, torch.float16)


def store(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    *,
    mean: Tensor | None = None,
    along: Tensor | None = None,
    rotated: bool = False,
    level: int | None = None,
) -> None:
    """Write the codes and scales of tokens where they belong, as `adaattn_hf.attention.stored.quantise` defines them.

    Args:
        x: `[batch, heads, n, head_dim]`, any strides.
        codes: Gets int8 `[batch, heads, n, head_dim]`, or codes of four bits: uint8 with half the channels.
        scale: Gets uint8 `[batch, heads, n]`.
        mean: fp32 `[batch, heads, head_dim]`, contiguous, taken off after turning.
        along: The same of length 1, the direction along which the errors of int8 codes cancel.
        rotated: Turn by `hadamard(head_dim)` first.
        level: Number of an instruction set, for tests; the library's own choice when None.

    Raises:
        RuntimeError: The library is missing, or values of four bits do not come in groups of 32 channels.
        ValueError: Codes, scales or the mean do not fit the tokens.
    """
    dim = x.shape[-1] if x.dim() else 0
    channels = dim // 2 if codes.dtype is torch.uint8 else dim
    extras = [t for t in (mean, along) if t is not None]
    shape = tuple(x.shape)
    fits = (
        len(shape) == 4
        and tuple(codes.shape) == (*shape[:3], channels)
        and codes.dtype in (torch.int8, torch.uint8)
        and codes.stride(3) == 1
        and tuple(scale.shape) == shape[:3]
        and scale.dtype is torch.uint8
        and x.dtype in _NATIVE
    )
    for t in extras:
        fits = fits and tuple(t.shape) == (*shape[:2], dim) and t.is_contiguous() and t.dtype is torch.float32
    tensors = (x, codes, scale, *extras)
    if not fits or not all(_in_memory(t) for t in tensors):
        raise ValueError(
            f"codes, scale, mean: got {[(tuple(t.shape), t.dtype, t.device.type) for t in tensors]} for tokens first, "
            "expected codes and scales of every token, and a contiguous mean in fp32, in the memory of the CPU"
        )
    native = library()
    if native is None:
        raise RuntimeError(f"native backend: {'; '.join(missing())}")
    status = native.handle.ada_store(
        STORE.pack(
            x.data_ptr(), codes.data_ptr(), scale.data_ptr(), 0 if mean is None else mean.data_ptr(),
            DTYPES[x.dtype], DTYPES[codes.dtype], rotated,
            *x.shape, *x.stride(), *codes.stride(), *scale.stride(),
            torch.get_num_threads(), native.level if level is None else level,
            0 if along is None else along.data_ptr(),
        )
    )  # fmt: skip
    if status:
        raise RuntimeError(_ERRORS[status])


def _in_memory(t: Tensor) -> bool:
    """Whether the numbers of a tensor lie where it says."""
    if lies(t):
        return True
    plain = type(t) is Tensor and t.layout == torch.strided and t.is_cpu
    plain = plain and not (t.is_neg() or t._is_zerotensor())
    return plain and bool(not t.numel() or t.untyped_storage().data_ptr())


def write(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    *,
    mean: Tensor | None = None,
    along: Tensor | None = None,
    rotated: bool = True,
) -> None:
    """Write codes and scales of `x` where they belong; what they are says `quantise`.

    Args:
        x: `[batch, heads, n, head_dim]`.
        codes: Gets int8 `[batch, heads, n, head_dim]`, or uint8 with half the channels for four bits.
        scale: Gets uint8 `[batch, heads, n]`.
        mean: fp32 `[batch, heads, head_dim]`, contiguous, taken off after turning.
        along: As in `quantise`; elsewhere than on CPUs a single token does without, which would take many small steps.
        rotated: Turn by `hadamard(head_dim)` first.
    """
    if x.is_cpu and x.dtype in _NATIVE and library() is not None:
        store(x, codes, scale, mean=mean, along=along, rotated=rotated)
        return
    bits = 4 if codes.dtype is torch.uint8 else 8
    along = along if x.is_cpu or x.shape[2] > 1 else None
    made, scales = quantise(x, bits=bits, mean=mean, along=along, rotated=rotated)
    codes.copy_(made)
    scale.copy_(scales)
