"""Dispatch of a request to torch's kernels: one operator where it says what the structure says, else a program."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult, CallSpec, holds_no_memory
from ...attention.structure import CallStructure
from ...attention.tap import transform_at_work
from ..base import nothing_seen, spec_of
from . import limits
from .decode import attend_few
from .fused import Fused, is_single, run_forward, run_single
from .kernels import (
    EfficientKernel,
    FlashCpuKernel,
    Kernel,
    MathKernel,
    Rectangle,
    aligned,
    repeated,
    splits_groups,
    steps_by_flash,
    suits_efficient,
)
from .packed import compacted, gathered_attention, layout_for, packed_attention
from .planner import Target, program_for
from .tiles import EMPTY, additive
from .traced import masked_call, plain_call, run_traced


def attend(request: AttentionRequest) -> AttentionResult:
    """Attention by the cheapest exact way."""
    query, value = request.query, request.value
    simple = (
        request.bias is None
        and request.softcap is None
        and request.sink_logits is None
        and not request.need_lse
    )
    # a program writes its parts into one output, which transforms do not see
    if torch.compiler.is_compiling() or transform_at_work() or holds_no_memory(query, request.key, value):
        return AttentionResult(_traced(request, simple).transpose(1, 2))
    if request.asks_nothing:
        return nothing_seen(request)
    structure = request.structure.settled()
    kind = structure.kind
    if simple and not request.dropout:
        settled = request.with_tensors(query, request.key, value, structure)
        way = way_of(spec_of(settled))
        out = None if way is None else way(query, request.key, value, request.scaling, structure)
        if out is not None:
            return AttentionResult(out)
        few = attend_few(request, structure) if query.shape[2] == 1 and query.is_cpu else None
        if few is not None:
            return AttentionResult(few)
    elif simple and kind in ("causal", "full") and value.shape[3] == query.shape[3]:
        return AttentionResult(
            plain_call(query, request.key, value, request, causal=kind == "causal").transpose(1, 2)
        )
    if request.dropout:
        return AttentionResult(
            run_traced(program_for(structure, _traced_target(request)), request).transpose(1, 2)
        )
    gathered = compacted(structure) if kind == "ragged" and request.bias is None else None
    if gathered is None:
        return _fused(request, structure)
    return gathered_attention(gathered, request, _fused)


def _kernel(request: AttentionRequest) -> Kernel:
    query = request.query
    bias_gradient = request.bias is not None and request.bias.requires_grad and torch.is_grad_enabled()
    if request.softcap is None and not bias_gradient:
        if query.device.type == "cpu":
            return FlashCpuKernel()
        if query.is_cuda and suits_efficient(query.dtype, query.shape[3], request.value.shape[3]):
            return EfficientKernel()
    return MathKernel(request.softcap, bias_gradient)


def _fused(request: AttentionRequest, structure: CallStructure) -> AttentionResult:
    kernel = _kernel(request)
    query, key, value = (_dense_last(t) for t in (request.query, request.key, request.value))
    size = value.shape[3]
    if isinstance(kernel, FlashCpuKernel) and size != query.shape[3]:
        wide = max(size, query.shape[3])
        query, key, value = (F.pad(t, (0, wide - t.shape[3])) for t in (query, key, value))
    bias, sink_logits = request.bias, request.sink_logits
    if bias is not None:
        bias = bias.to(query.dtype)
    grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, key, value, bias, sink_logits)
    )
    packable = bias is None and sink_logits is None and not request.need_lse
    layout = layout_for(structure) if packable and isinstance(kernel, EfficientKernel) else None
    if layout is not None:
        return AttentionResult(packed_attention(query, key, value, layout, request.scaling, gradient=grad))
    program = program_for(structure, _target(request, kernel, grad))
    if not program.parts:
        return nothing_seen(request)
    lse: Tensor | None
    if (
        sink_logits is None
        and not request.need_lse
        and is_single(program, structure)
        and isinstance(kernel, FlashCpuKernel)
    ):
        # torch knows the derivative of a single call
        out, lse = run_single(kernel, program.parts[0], query, key, value, request.scaling, bias), None
    else:
        inputs = query, key, value, bias, sink_logits, kernel, program, structure, request.scaling
        out, lse = (
            Fused.apply(*inputs)  # type: ignore[no-untyped-call]
            if grad
            else run_forward(*inputs, need_lse=request.need_lse)
        )
    if out.shape[3] != size:
        out = out[..., :size]
    if not request.need_lse or lse is None:
        return AttentionResult(out)
    return AttentionResult(out, lse.masked_fill(lse <= EMPTY, float("-inf")).float())


def _dense_last(t: Tensor) -> Tensor:
    """The kernels read the last dimension as contiguous memory."""
    return t if t.stride(3) == 1 else t.contiguous()


def _target(request: AttentionRequest, kernel: Kernel, grad: bool) -> Target:
    query, structure = request.query, request.structure
    heads = query.shape[1]
    work = 2 * heads * (query.shape[3] + request.value.shape[3])
    cpu = query.device.type == "cpu"
    if cpu:
        rate = limits.CPU_RATE * torch.get_num_threads()
    else:
        rate = limits.CUDA_RATE if request.query.dtype.itemsize < 4 else limits.CUDA_RATE_FP32
    if isinstance(kernel, MathKernel):
        step = max(
            16,
            min(
                limits.BAND_ROWS, limits.TILE // max(1, structure.batch * heads * structure.kv_len) // 16 * 16
            ),
        )
        band = step
    else:
        step = limits.WINDOW_ROWS_GRADIENT if grad or not cpu else limits.WINDOW_ROWS
        band = limits.BAND_ROWS
    lse = grad or request.need_lse or request.sink_logits is not None
    call = limits.CPU_CALL if cpu else limits.CUDA_CALL
    return Target(
        query.device, query.dtype, True, kernel.flag, step, request.bias is None, band, work, rate, call, lse
    )


def _traced_target(request: AttentionRequest) -> Target:
    """Parts for `run_traced`: nothing merged, one call per part."""
    band = request.structure.q_len if torch.compiler.is_compiling() else limits.BAND_ROWS
    flag = request.bias is None and request.softcap is None and request.sink_logits is None
    return Target(
        request.query.device,
        request.query.dtype,
        False,
        flag,
        limits.WINDOW_ROWS_GRADIENT,
        False,
        band,
        1,
        1e14,
        0.0,
        False,
    )


def _traced(request: AttentionRequest, simple: bool) -> Tensor:
    """A traced graph: nothing may be read, and only fixed numbers may decide."""
    structure = request.structure
    kind = structure.kind
    if simple and kind in ("full", "causal"):
        return plain_call(request.query, request.key, request.value, request, causal=kind == "causal")
    if simple and kind == "suffix" and structure.q_len == 1:
        stop = structure.offset() + 1
        return masked_call(request, request.query, request.key[:, :, :stop], request.value[:, :, :stop], None)
    if kind == "window" and _fixed(structure):
        return run_traced(program_for(structure, _traced_target(request)), request)
    mask = structure.visible(device=request.query.device)
    if request.bias is not None:
        mask = request.bias.to(request.query.dtype).masked_fill(~mask, float("-inf"))
    return masked_call(request, request.query, request.key, request.value, mask)


def _fixed(structure: CallStructure) -> bool:
    """Whether the lengths are numbers and not symbols of a graph for many lengths."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(structure.q_len) and has_static_value(structure.kv_len)


Way = Callable[[Tensor, Tensor, Tensor, float, CallStructure], "Tensor | None"]
"""Maps query, key, value, scaling and a settled structure to the output `[batch, q_len, heads, head_dim_v]`; None where
a call needs more than one operator says."""


def way_of(spec: CallSpec) -> Way | None:
    """The one operator call that serves ordinary calls of a kind; None where a program of calls is made for each."""
    if spec.kind in ("full", "causal", "suffix") and spec.head_dim == spec.head_dim_v:
        if spec.decode:
            return _step(spec)
        if spec.kind != "suffix":
            return _square(spec)
    if spec.device != "cuda" or not suits_efficient(spec.dtype, spec.head_dim, spec.head_dim_v):
        return None
    if spec.kind == "ragged" and spec.holes is None and not spec.decode:
        return None if spec.needs_grad else _masked
    return _over_runs(spec.needs_grad) if spec.kind in ("ragged", "suffix") else None


def _operator(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool, grouped: bool
) -> Tensor:
    """One call without a mask."""
    more = {"enable_gqa": True} if grouped else {}
    out: Tensor = F.scaled_dot_product_attention(query, key, value, None, 0.0, causal, scale=scaling, **more)
    return out.transpose(1, 2)


def _step(spec: CallSpec) -> Way:
    """One query: the operator's own CUDA kernels split the keys among programs and read grouped heads once."""
    grouped, flash = spec.groups > 1, steps_by_flash(spec)
    cpu = spec.device == "cpu"
    any_length = spec.device == "cuda" or (spec.groups == 1 and spec.dtype == torch.float32)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure
    ) -> Tensor | None:
        kv_len = structure.kv_len
        stop = min(kv_len, structure.offset() + 1) if structure.causal else kv_len
        if stop < 1 or not (any_length or stop <= limits.SHORT_KEYS):
            return None  # on processors the other single queries have ways of their own
        if cpu and stop < limits.VECTOR_KEYS:
            return _among_few(query, key, value, scaling, False, grouped, stop)
        if stop < kv_len:
            key, value = key[:, :, :stop], value[:, :, :stop]
        if flash and torch.backends.cuda.flash_sdp_enabled():  # the user may have switched it off
            query, key, value = (_dense_last(t) for t in (query, key, value))
            out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, scale=scaling
            )[0]
            return out.transpose(1, 2)
        return _operator(query, key, value, scaling, False, grouped)

    return attend


def _square(spec: CallSpec) -> Way:
    """As many queries as keys, or all keys for all queries."""
    causal, grouped, cpu = spec.kind == "causal", spec.groups > 1, spec.device == "cpu"
    widens = grouped and splits_groups(spec.device, spec.dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure) -> Tensor:
        if cpu and structure.kv_len < limits.VECTOR_KEYS:
            return _among_few(query, key, value, scaling, causal, grouped, structure.kv_len)
        if widens:
            return _operator(query, repeated(key, query), repeated(value, query), scaling, causal, False)
        return _operator(query, key, value, scaling, causal, grouped)

    return attend


def _among_few(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool, grouped: bool, stop: int
) -> Tensor:
    """One call among the keys before `stop`, so few that torch's operator would lose not-a-numbers."""
    key, value = key[:, :, :stop], value[:, :, :stop]
    if not (query.numel() and key.numel() and value.numel()):
        return _operator(query, key, value, scaling, causal, grouped)  # the kernel divides by the extents
    query, key, value = (_dense_last(t) for t in (query, key, value))
    out = FlashCpuKernel().forward(Rectangle(query, key, value, None, causal, scaling))[0]
    return out.transpose(1, 2)


def _masked(query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure) -> Tensor:
    """One call with a mask of numbers; torch makes one of a boolean mask in each layer."""
    key, value = repeated(key, query), repeated(value, query)
    mask = structure.derived(additive_mask, query.dtype, query.device).expand(*query.shape[:3], -1)
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, False, scale=scaling
    )[0]
    return out.transpose(1, 2)


def additive_mask(structure: CallStructure, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask, `[batch or 1, heads or 1, q_len, kv_len]`."""
    return aligned(additive(structure.visible(device=device), dtype))


def _over_runs(gradient: bool) -> Way:
    """One call over packed runs, where a structure is made of such."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, scaling: float, structure: CallStructure
    ) -> Tensor | None:
        layout = layout_for(structure)
        if layout is None:
            return None
        return packed_attention(query, key, value, layout, scaling, gradient=gradient)

    return attend
