"""Calls of torch's attention operator, and what its kernels ask for on each device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.kind import CallKind
from ..capability import capability

VECTOR_KEYS = 16
"""Scores that the widest vector of a processor holds; not measured."""

# Before 2.9 torch's kernel for processors takes no grouped heads; asked for them, torch writes the score matrix.
_GROUPED_ON_CPU = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


def operator(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """One call, `[batch, heads, q_len, head_dim_v]`, brought into a form that a fused kernel takes.

    The mask is additive, broadcastable to `[batch, heads, q_len, kv_len]`; `causal` instead of it lets query `i` see
    keys up to `i`.
    """
    query, key, value = dense_last(query), dense_last(key), dense_last(value)
    size, dim = value.shape[3], query.shape[3]
    by_name = query.is_cuda and not dropout and suits_efficient(query.dtype, dim, size)
    if mask is not None and by_name and not mask.requires_grad:
        # by torch's memory-efficient kernel, which plans nothing anew for another number of keys
        mask = aligned(mask.expand(*mask.shape[:-1], key.shape[2])).expand(*query.shape[:3], key.shape[2])
        key, value = repeated(key, query), repeated(value, query)
        kept = wants_gradient(query, key, value)
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, kept, scale=scaling
        )[0]
        return out
    if query.is_cpu and mask is None and key.shape[2] < VECTOR_KEYS:
        # with fewer keys than a vector holds the kernel drops rows of not-a-numbers, unless it is given a mask
        later = query.new_full((query.shape[2] if causal else 1, key.shape[2]), float("-inf"))
        mask, causal = later.triu_(1) if causal else later.zero_(), False
    if query.is_cpu and size != dim:
        query, key, value = (F.pad(t, (0, max(size, dim) - t.shape[3])) for t in (query, key, value))
    out = bare_operator(query, key, value, scaling, mask, causal=causal, dropout=dropout)
    return out if out.shape[3] == size else out[..., :size]


def bare_operator(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """As `operator`, for tensors of which nothing but the number of heads may be looked at."""
    grouped = bool(query.shape[1] != key.shape[1])
    if grouped:
        # Left grouped where no fused kernel takes that, several queries go to unfused operations, which write the whole
        # score matrix and keep it for the backward: on CUDA 2.25 GiB a layer for 9 float32 heads and 8,192 tokens.
        flash = query.dtype != torch.float32 and query.shape[3] == value.shape[3]
        elsewhere = not query.is_cpu and mask is None and (flash or query.shape[2] == 1 or not query.is_cuda)
        if not (_GROUPED_ON_CPU if query.is_cpu else elsewhere):
            key, value, grouped = repeated(key, query), repeated(value, query), False
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=grouped)


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether a backward pass may follow, for which kernels have to keep the log-sum-exp."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def dense_last(t: Tensor) -> Tensor:
    """The tensor with its last dimension as contiguous memory, as the kernels read it."""
    return t if t.stride(-1) == 1 else t.contiguous()


def suits_efficient(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether torch's memory-efficient kernel takes a dtype and head sizes."""
    return dtype != torch.float64 and not any(size * dtype.itemsize % 16 for size in sizes)


def suits_flash(dtype: torch.dtype, size: int, value_size: int) -> bool:
    """Whether torch's flash kernel takes a dtype and head sizes."""
    return dtype.itemsize == 2 and size == value_size <= 256 and size % 8 == 0


def steps_by_flash(kind: CallKind) -> bool:
    """Whether a decode step goes to torch's flash kernel by name.

    Left to itself torch takes cuDNN on datacentre devices (`check_prefer_cudnn_attention` in its sdp_utils.cpp), which
    plans a kernel for every number of keys that it has not met: the host spends tens of milliseconds on each new token.
    The flash kernel reads a step's keys as fast. Elsewhere torch takes it unasked.
    """
    suits = suits_flash(kind.dtype, kind.head_dim, kind.head_dim_v)
    if not (kind.device.type == "cuda" and suits and not kind.needs_grad):
        return False
    device, flash = capability(kind.device), torch.backends.cuda.is_flash_attention_available()
    return flash and device is not None and device.sm in ((9, 0), (10, 0))


def repeated(t: Tensor, query: Tensor) -> Tensor:
    """Keys or values with the query's number of heads."""
    groups = query.shape[1] // t.shape[1]
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as numbers to add: 0 where a key is visible, -inf where it is not; in rows that are `aligned`."""
    *rows, kv_len = visible.shape
    with torch.inference_mode(False):  # a later pass may keep it for its gradients
        room = torch.zeros((*rows, kv_len + -kv_len % 16), dtype=dtype, device=visible.device)
        return room[..., :kv_len].masked_fill_(~visible, float("-inf"))


def aligned(mask: Tensor) -> Tensor:
    """The mask on memory whose rows start at multiples of 16 elements, as the memory-efficient kernel wants them."""
    kv_len = mask.shape[-1]
    if kv_len % 16 or mask.stride(-2) % 16 or mask.storage_offset() % 16 or mask.stride(-1) != 1:
        room = mask.new_empty((*mask.shape[:-1], kv_len + -kv_len % 16))
        mask = room[..., :kv_len].copy_(mask)
    return mask
