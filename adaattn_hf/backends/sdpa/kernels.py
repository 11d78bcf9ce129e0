"""Fused attention of one rectangle that also returns its log-sum-exp, with the matching backward.

Every kernel computes `softmax(scaling * query @ key^T + mask) @ value` for `[rows, heads, q_len, head_dim]` against
`[rows, num_kv_heads, kv_len, head_dim]`. The backward takes the output and log-sum-exp of the *whole* row, of which the
rectangle may be a part only: that is what makes merging differentiable.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...attention.request import CallSpec
from ..capability import capability
from . import limits


class Rectangle(NamedTuple):
    """Queries and the keys that they are computed against; `mask` is additive, `causal` starts at both first tokens."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scaling: float


class Gradients(NamedTuple):
    """Gradients of a rectangle; `bias` is that of the mask, where it was asked for."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None


class Kernel(Protocol):
    """One way to compute a rectangle."""

    flag: bool

    def forward(self, part: Rectangle) -> tuple[Tensor, Tensor]:
        """`out` `[rows, heads, q_len, head_dim]` and `lse` `[rows, heads, q_len]`; lse of empty rows is undefined."""
        ...

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, part: Rectangle) -> Gradients:
        """Gradients of the rectangle, given output and log-sum-exp of its rows."""
        ...


# Before 2.9 torch's kernel reads and writes past the end of keys that have fewer heads than the queries.
_GROUPED_ON_CPU = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


class FlashCpuKernel:
    """torch's flash attention on the CPU.

    With fewer keys than a vector holds it drops NaN rows unless given a mask: such calls get one that hides nothing.
    """

    flag = True

    def forward(self, part: Rectangle) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, mask, causal, scaling = part
        if not _GROUPED_ON_CPU:
            key, value = repeated(key, query), repeated(value, query)
        if mask is None and key.shape[2] < limits.VECTOR_KEYS:
            mask = key.new_zeros((1, 1, 1, key.shape[2]))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )
        return out, lse

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, part: Rectangle) -> Gradients:
        """See `Kernel`."""
        query, key, value, mask, causal, scaling = part
        kv_heads = key.shape[1]
        if not _GROUPED_ON_CPU:
            key, value = repeated(key, query), repeated(value, query)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scaling
        )
        return Gradients(grads[0], _summed(grads[1], kv_heads), _summed(grads[2], kv_heads))


class EfficientKernel:
    """torch's memory-efficient attention on CUDA."""

    flag = True

    def forward(self, part: Rectangle) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, mask, causal, scaling = part
        key, value = repeated(key, query), repeated(value, query)
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _for_all_heads(mask, query, key), True, 0.0, causal, scale=scaling
        )
        return out, lse[:, :, : query.shape[2]]

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, part: Rectangle) -> Gradients:
        """See `Kernel`."""
        query, key, value, mask, causal, scaling = part
        kv_heads = key.shape[1]
        key, value = repeated(key, query), repeated(value, query)
        # the kernel reads the log-sum-exp in rows of 32
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32)).contiguous()
        none = torch.zeros((), dtype=torch.int64, device=query.device)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, _for_all_heads(mask, query, key), out, padded, none, none, 0.0,
            [True, True, True, False], causal, scale=scaling,
        )  # fmt: skip
        return Gradients(grads[0], _summed(grads[1], kv_heads), _summed(grads[2], kv_heads))


def suits_efficient(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether torch's memory-efficient kernel takes a dtype and head sizes."""
    return dtype != torch.float64 and not any(size * dtype.itemsize % 16 for size in sizes)


@functools.cache
def _cudnn_comes_first(index: int | None) -> bool:
    """Whether torch prefers cuDNN's kernels on a device: `check_prefer_cudnn_attention` in torch's sdp_utils.cpp."""
    device = capability(index)
    flash = torch.backends.cuda.is_flash_attention_available()
    return flash and device is not None and device.sm in ((9, 0), (10, 0))


def steps_by_flash(spec: CallSpec) -> bool:
    """Whether a decode step goes to torch's flash kernel by name.

    Left to itself torch takes cuDNN on datacentre devices, which plans a kernel for every number of keys that it has
    not met: the host spends tens of milliseconds on each new token. The flash kernel reads a step's keys as fast.
    Elsewhere torch takes it unasked.
    """
    half = spec.dtype in (torch.float16, torch.bfloat16)
    fits = spec.head_dim == spec.head_dim_v <= 256 and spec.head_dim % 8 == 0
    ours = spec.device == "cuda" and half and fits and not spec.needs_grad
    return ours and _cudnn_comes_first(spec.device_index)


def splits_groups(device: str, dtype: torch.dtype) -> bool:
    """Whether torch's fused kernel takes no grouped heads there, several queries at a time.

    Left grouped, they go to unfused operations, which write the whole score matrix, and keep it for the backward: 2.25
    GiB a layer for 9 heads and 8,192 tokens.
    """
    return device == "cuda" and dtype == torch.float32


def repeated(t: Tensor, query: Tensor) -> Tensor:
    """Keys or values with the query's number of heads."""
    groups = query.shape[1] // t.shape[1]
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def _summed(grad: Tensor, kv_heads: int) -> Tensor:
    if grad.shape[1] == kv_heads:
        return grad
    summed: Tensor = grad.unflatten(1, (kv_heads, -1)).sum(dim=2)
    return summed


def aligned(mask: Tensor) -> Tensor:
    """The mask on memory whose rows start at multiples of 16 elements, as the memory-efficient kernel wants them."""
    kv_len = mask.shape[-1]
    if kv_len % 16 or mask.stride(-2) % 16 or mask.storage_offset() % 16 or mask.stride(-1) != 1:
        room = mask.new_empty((*mask.shape[:-1], kv_len + -kv_len % 16))
        mask = room[..., :kv_len].copy_(mask)
    return mask


def _for_all_heads(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape[-1] != key.shape[2]:
        mask = mask.expand(*mask.shape[:-1], key.shape[2])
    return aligned(mask).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class MathKernel:
    """Plain operations; for softcapped scores, gradients of the bias, and devices without a fused kernel."""

    flag = False

    def __init__(self, softcap: float | None = None, bias_gradient: bool = False) -> None:
        """`softcap` as in `AttentionRequest`."""
        self.softcap = softcap
        self.bias_gradient = bias_gradient

    def _scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor | None]:
        """Scores `[rows, heads, q_len, kv_len]` in at least fp32, and `tanh` of the softcap where there is one."""
        rows, heads, q_len, dim = query.shape
        kv_heads = key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        grouped = query.reshape(rows, kv_heads, heads // kv_heads * q_len, dim)
        scores = torch.matmul(grouped.to(wide) * scaling, key.to(wide).transpose(2, 3))
        scores = scores.view(rows, heads, q_len, key.shape[2])
        squashed = None
        if self.softcap is not None:
            squashed = torch.tanh(scores / self.softcap)
            scores = squashed * self.softcap
        return scores if mask is None else scores + mask, squashed

    def forward(self, part: Rectangle) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        query, key, value, mask, _, scaling = part
        scores, _ = self._scores(query, key, mask, scaling)
        top = scores.amax(dim=3, keepdim=True)
        top.masked_fill_(torch.isinf(top), 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=3, keepdim=True)
        lse = (top + torch.log(total)).squeeze(3)
        weights /= total.masked_fill(total == 0, 1.0)
        rows, heads, q_len, kv_len = weights.shape
        grouped = weights.to(value.dtype).view(rows, value.shape[1], heads // value.shape[1] * q_len, kv_len)
        return torch.matmul(grouped, value).view(rows, heads, q_len, value.shape[3]), lse

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor, part: Rectangle) -> Gradients:
        """See `Kernel`."""
        query, key, value, mask, _, scaling = part
        scores, squashed = self._scores(query, key, mask, scaling)
        weights = scores.sub_(lse.unsqueeze(3)).exp_()
        rows, heads, q_len, kv_len = weights.shape
        kv_heads = key.shape[1]
        shape = (rows, kv_heads, heads // kv_heads * q_len)
        wide = weights.dtype
        grad_w = grad.to(wide)
        delta = (grad_w * out.to(wide)).sum(dim=3, keepdim=True)
        folded = grad_w.reshape(*shape, grad.shape[3])
        by_key = weights.view(*shape, kv_len)
        grad_value = torch.matmul(by_key.transpose(2, 3), folded)
        slope = torch.matmul(folded, value.to(wide).transpose(2, 3)).view_as(weights)
        slope = slope.sub_(delta).mul_(weights)
        bias = slope.clone() if self.bias_gradient and squashed is not None else slope
        if squashed is not None:
            slope = slope * (1 - squashed * squashed)
        folded_slope = slope.view(*shape, kv_len)
        grad_query = torch.matmul(folded_slope, key.to(wide)).view(rows, heads, q_len, key.shape[3]) * scaling
        grad_key = torch.matmul(folded_slope.transpose(2, 3), query.to(wide).reshape(*shape, -1)) * scaling
        return Gradients(grad_query, grad_key, grad_value, bias if self.bias_gradient else None)
