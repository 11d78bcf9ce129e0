"""Gradients of attention over segments, with a window and sinks per key/value head.

FlashAttention-2's backward pass (Dao 2023): weights are computed again from the saved log-sum-exp, one kernel walks the
queries of a block of keys, another the keys of a block of queries, so that nothing is added up in an order that varies.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...attention.call import AttentionCall, AttentionResult
from ...attention.gradients import first_order
from ...attention.heads import head_windows
from ...attention.kind import CallKind
from ..base import derived_on
from .forward import attend_forward
from .launch import Launcher, aligned, descriptor_of, device_facts
from .tables import Blocking, find_entries, window_table
from .tiles import edge_tile, edges_of, entry_of, keys_of, rows_of, tanh, visible
from .tiling import fitting_tile, padded, scale_of


@Launcher
@triton.jit
def prepare(  # type: ignore[no-untyped-def]
    out_ptr, grad_ptr, lse_ptr, grad_lse_ptr, shift_ptr, sums_ptr, o_b, o_n, o_h, o_d, g_b, g_n, g_h, g_d, q_len, factor,
    DIM_V: tl.constexpr, PAD_V: tl.constexpr, HAS_GRAD_LSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per-query terms that both kernels below start their sums from; programs are (batch row, head, block of queries).

    `shift`: minus the log-sum-exp, converted by `factor` to the unit of the products. `sums`: minus rowsum(dO * O), plus
    the gradient of the log-sum-exp.
    """
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dv = tl.arange(0, PAD_V)
    places = (row * tl.num_programs(1) + head) * q_len + i
    out = rows_of(out_ptr + row * o_b + head * o_h, i, dv, o_n, o_d, q_len, DIM_V, PAD_V, False)
    grad = rows_of(grad_ptr + row * g_b + head * g_h, i, dv, g_n, g_d, q_len, DIM_V, PAD_V, False)
    sums = -tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        sums += tl.load(grad_lse_ptr + places, mask=i < q_len, other=0.0)
    tl.store(sums_ptr + places, sums, mask=i < q_len)
    tl.store(shift_ptr + places, -factor * tl.load(lse_ptr + places, mask=i < q_len, other=0.0), mask=i < q_len)


@triton.jit
def _tile(a, b, value, grad, shift, sums, scale, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of a tile and the gradient of its scores, of `a @ b` and `value @ grad`.

    `shift` and `sums` are what `prepare` made, and start the sums of the products: so they hold no registers of their own.
    """
    if HAS_CAP:
        tanh_scores = tanh(tl.dot(a, b, input_precision="ieee") * (scale / softcap))
        weights = tl.exp2(softcap * tanh_scores * 1.4426950408889634 + shift)
    else:
        weights = tl.exp2(tl.dot(a, b, shift, input_precision="ieee") * scale)
    ds = tl.dot(value, grad, sums, input_precision="ieee")
    if HAS_CAP:
        ds = ds * (1.0 - tanh_scores * tanh_scores)
    return weights, ds


@Launcher
@triton.jit
def of_keys(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, grad_ptr, q_bulk, grad_bulk, shift_ptr, sums_ptr, dk_ptr, dv_ptr, segments_ptr, work_ptr, rules_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_n, g_h, g_d, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    l_b, l_h, scale, scaling, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, BULK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values from all queries that see them; programs are entries of the work table.

    An entry is (segment, first key, key/value head).
    """
    row_number, q_start, q_len, k_start, k_len, offset, first, kv_head, window, sinks = entry_of(
        work_ptr, segments_ptr, rules_ptr, tl.program_id(0), WINDOW
    )
    row = row_number.to(tl.int64)
    j = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    k_base = k_ptr + row * k_b + kv_head.to(tl.int64) * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head.to(tl.int64) * v_h + k_start.to(tl.int64) * v_n
    k_tile = rows_of(k_base, j, d, k_n, k_d, k_len, DIM, PAD, False)
    v_tile = rows_of(v_base, j, dv, v_n, v_d, k_len, DIM_V, PAD_V, False)

    # queries that see some key of the block, and those that see all of them
    last = tl.minimum(first + BLOCK_N, k_len) - 1
    start, stop = 0, q_len
    all_start, all_stop = 0, q_len
    if CAUSAL:
        start = tl.maximum(0, first - offset)
        all_start = tl.maximum(0, last - offset)
    if WINDOW:
        all_stop = tl.minimum(q_len, tl.maximum(0, first + window - offset))
        if first >= sinks:
            stop = tl.maximum(0, tl.minimum(q_len, last + window - offset))
        if not CAUSAL:
            all_start = tl.maximum(0, last - window + 1 - offset)
            if first >= sinks:
                start = tl.maximum(0, first - window + 1 - offset)
    if first + BLOCK_N > k_len:
        all_stop = 0  # keys that are not there are left out by the rule
    start = start // BLOCK_M * BLOCK_M
    all_start = tl.minimum(tl.maximum(start, tl.cdiv(all_start, BLOCK_M) * BLOCK_M), tl.cdiv(stop, BLOCK_M) * BLOCK_M)
    all_start = tl.maximum(all_start, start)
    all_stop = tl.maximum(all_start, tl.minimum(all_stop, stop) // BLOCK_M * BLOCK_M)
    lead_tiles = tl.cdiv(tl.maximum(tl.minimum(all_start, stop) - start, 0), BLOCK_M)
    trail_tiles = tl.cdiv(tl.maximum(stop - all_stop, 0), BLOCK_M)

    dk_acc = tl.zeros([BLOCK_N, PAD], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, PAD_V], tl.float32)
    for member in range(0, GROUPS):
        head = kv_head * GROUPS + member
        q_base = q_ptr + row * q_b + head.to(tl.int64) * q_h + q_start.to(tl.int64) * q_n
        g_base = grad_ptr + row * g_b + head.to(tl.int64) * g_h + q_start.to(tl.int64) * g_n
        l_base = row * l_b + head * l_h + q_start
        for tile in range(0, lead_tiles + trail_tiles):
            tile_start = tl.where(tile < lead_tiles, start + tile * BLOCK_M, all_stop + (tile - lead_tiles) * BLOCK_M)
            i = tile_start + tl.arange(0, BLOCK_M)
            q_tile = rows_of(q_base, i, d, q_n, q_d, q_len, DIM, PAD, False)
            grad = rows_of(g_base, i, dv, g_n, g_d, q_len, DIM_V, PAD_V, False)
            shift = tl.load(shift_ptr + l_base + i, mask=i < q_len, other=0.0)[None, :].broadcast_to(BLOCK_N, BLOCK_M)
            sums = tl.load(sums_ptr + l_base + i, mask=i < q_len, other=0.0)[None, :].broadcast_to(BLOCK_N, BLOCK_M)
            weights, ds = _tile(k_tile, tl.trans(q_tile), v_tile, tl.trans(grad), shift, sums, scale, softcap, HAS_CAP)
            seen = tl.trans(visible(i + offset, j, k_len, window, sinks, CAUSAL, WINDOW))
            weights = tl.where(seen & (i < q_len)[None, :], weights, 0.0)
            dv_acc = tl.dot(weights.to(grad.dtype), grad, dv_acc, input_precision="ieee")
            dk_acc = tl.dot((weights * ds).to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
        for tile_start in range(all_start, all_stop, BLOCK_M):
            i = tile_start + tl.arange(0, BLOCK_M)
            if BULK:
                q_tile = q_bulk.load([row_number, head, q_start + tile_start, 0]).reshape(BLOCK_M, PAD)
                grad = grad_bulk.load([row_number, head, q_start + tile_start, 0]).reshape(BLOCK_M, PAD_V)
            else:
                q_tile = rows_of(q_base, i, d, q_n, q_d, q_len, DIM, PAD, True)
                grad = rows_of(g_base, i, dv, g_n, g_d, q_len, DIM_V, PAD_V, True)
            shift = tl.load(shift_ptr + l_base + i)[None, :].broadcast_to(BLOCK_N, BLOCK_M)
            sums = tl.load(sums_ptr + l_base + i)[None, :].broadcast_to(BLOCK_N, BLOCK_M)
            weights, ds = _tile(k_tile, tl.trans(q_tile), v_tile, tl.trans(grad), shift, sums, scale, softcap, HAS_CAP)
            dv_acc = tl.dot(weights.to(grad.dtype), grad, dv_acc, input_precision="ieee")
            dk_acc = tl.dot((weights * ds).to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    valid = (j < k_len)[:, None]
    rows = (k_start + j).to(tl.int64)[:, None]
    tl.store(
        dk_ptr + row * dk_b + kv_head * dk_h + rows * dk_n + d[None, :],
        (dk_acc * scaling).to(dk_ptr.dtype.element_ty),
        mask=valid & (d < DIM)[None, :],
    )
    tl.store(
        dv_ptr + row * dv_b + kv_head * dv_h + rows * dv_n + dv[None, :],
        dv_acc.to(dv_ptr.dtype.element_ty),
        mask=valid & (dv < DIM_V)[None, :],
    )


@Launcher
@triton.jit
def of_queries(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, grad_ptr, shift_ptr, sums_ptr, dq_ptr, segments_ptr, work_ptr, rules_ptr,
    q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, g_b, g_n, g_h, g_d, dq_b, dq_h, dq_n,
    l_b, l_h, scale, scaling, softcap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of queries; programs are entries of the work table, each for all query heads of its group."""
    row, q_start, q_len, k_start, k_len, offset, first, kv_head, window, sinks = entry_of(
        work_ptr, segments_ptr, rules_ptr, tl.program_id(0) // GROUPS, WINDOW
    )
    head = (kv_head * GROUPS + tl.program_id(0) % GROUPS).to(tl.int64)
    row = row.to(tl.int64)
    i = first + tl.arange(0, BLOCK_M)
    p = i + offset
    d = tl.arange(0, PAD)
    dv = tl.arange(0, PAD_V)
    q_base = q_ptr + row * q_b + head * q_h + q_start.to(tl.int64) * q_n
    g_base = grad_ptr + row * g_b + head * g_h + q_start.to(tl.int64) * g_n
    q_tile = rows_of(q_base, i, d, q_n, q_d, q_len, DIM, PAD, False)
    grad = rows_of(g_base, i, dv, g_n, g_d, q_len, DIM_V, PAD_V, False)
    l_base = row * l_b + head * l_h + q_start
    shift = tl.load(shift_ptr + l_base + i, mask=i < q_len, other=0.0)[:, None].broadcast_to(BLOCK_M, BLOCK_N)
    sums = tl.load(sums_ptr + l_base + i, mask=i < q_len, other=0.0)[:, None].broadcast_to(BLOCK_M, BLOCK_N)
    k_base = k_ptr + row * k_b + kv_head.to(tl.int64) * k_h + k_start.to(tl.int64) * k_n
    v_base = v_ptr + row * v_b + kv_head.to(tl.int64) * v_h + k_start.to(tl.int64) * v_n

    start, stop, all_start, all_stop = keys_of(
        first + offset, tl.minimum(first + BLOCK_M, q_len) - 1 + offset, k_len, window, sinks, BLOCK_N, CAUSAL, WINDOW
    )  # fmt: skip
    of_sinks, of_left, of_right = edges_of(start, stop, all_start, all_stop, sinks, BLOCK_N, WINDOW)

    dq_acc = tl.zeros([BLOCK_M, PAD], tl.float32)
    for tile in range(0, of_sinks + of_left + of_right):
        tile_start, limit = edge_tile(tile, of_sinks, of_left, start, all_stop, k_len, sinks, BLOCK_N, WINDOW)
        j = tile_start + tl.arange(0, BLOCK_N)
        k_tile = rows_of(k_base, j, d, k_n, k_d, limit, DIM, PAD, False, TURNED=True)
        v_tile = rows_of(v_base, j, dv, v_n, v_d, limit, DIM_V, PAD_V, False, TURNED=True)
        weights, ds = _tile(q_tile, k_tile, grad, v_tile, shift, sums, scale, softcap, HAS_CAP)
        weights = tl.where(visible(p, j, limit, window, sinks, CAUSAL, WINDOW), weights, 0.0)
        dq_acc = tl.dot((weights * ds).to(k_tile.dtype), tl.trans(k_tile), dq_acc, input_precision="ieee")
    for tile_start in range(all_start, all_stop, BLOCK_N):
        j = tile_start + tl.arange(0, BLOCK_N)
        k_tile = rows_of(k_base, j, d, k_n, k_d, k_len, DIM, PAD, True, TURNED=True)
        v_tile = rows_of(v_base, j, dv, v_n, v_d, k_len, DIM_V, PAD_V, True, TURNED=True)
        weights, ds = _tile(q_tile, k_tile, grad, v_tile, shift, sums, scale, softcap, HAS_CAP)
        dq_acc = tl.dot((weights * ds).to(k_tile.dtype), tl.trans(k_tile), dq_acc, input_precision="ieee")
    tl.store(
        dq_ptr + row * dq_b + head * dq_h + (q_start + i).to(tl.int64)[:, None] * dq_n + d[None, :],
        (dq_acc * scaling).to(dq_ptr.dtype.element_ty),
        mask=(i < q_len)[:, None] & (d < DIM)[None, :],
    )


def attend_with_gradients(call: AttentionCall, kind: CallKind) -> AttentionResult:
    """Attention whose output, and log-sum-exp if it is asked for, can be differentiated."""
    call = call.with_positive_scaling()  # the kernels divide by it, and take the largest score by the largest product
    tensors = call.query, call.key, call.value, call.sink_logits
    out, lse = _Attention.apply(*tensors, call, kind)  # type: ignore[no-untyped-call]
    return AttentionResult(out, lse if call.need_lse else None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, call, kind = inputs
        out, lse = attend_forward(call, kind)
        ctx.save_for_backward(*tensors, out, lse)
        windows = head_windows(call.structure, call.per_head, call.key.shape[1])
        ctx.parts = call.structure, call.scaling, call.softcap, windows
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        structure, scaling, softcap, windows = ctx.parts
        grad = torch.zeros_like(out) if grad is None else grad
        batch, heads, q_len, dim = query.shape
        kv_heads, kv_len, dim_v = key.shape[1], key.shape[2], value.shape[3]
        pad, pad_v, capped = padded(dim), padded(dim_v), softcap is not None
        shift, sums = torch.empty((2, batch, heads, q_len), dtype=torch.float32, device=query.device)
        # saved tensors may come back at any address
        even = aligned(query, key, value, out, lse, grad, grad_lse, shift, sums)

        numbers = *out.stride(), *grad.stride(), q_len
        arguments: tuple[Any, ...] = (
            out, grad, lse, lse if grad_lse is None else grad_lse.contiguous(), shift, sums, *numbers,
            1.4426950408889634 if capped else 1.0 / scaling,
        )  # fmt: skip
        constants: dict[str, Any] = {
            "DIM_V": dim_v, "PAD_V": pad_v, "HAS_GRAD_LSE": grad_lse is not None, "BLOCK": 64, "num_warps": 4,
        }  # fmt: skip
        prepare((batch, heads, -(-q_len // 64)), arguments, constants, (query.dtype, numbers) if even else None)

        segments = structure.segments() or ()
        columns = sum(s.k_len for s in segments) == batch * kv_len
        dq, dk, dv = (
            (like.new_empty if whole else like.new_zeros)((batch, length, count, width)).transpose(1, 2)
            for like, whole, length, count, width in (
                (query, bool(segments), q_len, heads, dim),
                (key, columns, kv_len, kv_heads, dim),
                (value, columns, kv_len, kv_heads, dim_v),
            )
        )
        if segments:
            constants = {
                "GROUPS": heads // kv_heads, "DIM": dim, "DIM_V": dim_v, "PAD": pad, "PAD_V": pad_v,
                "CAUSAL": structure.causal, "WINDOW": windows is not None, "HAS_CAP": capped,
            }  # fmt: skip
            strides = *query.stride(), *key.stride(), *value.stride(), *grad.stride()
            scales = scale_of(scaling, softcap), float(scaling), float(softcap or 0.0)
            width, memory = max(pad, pad_v) * query.itemsize, device_facts(query.device).memory

            runs = windows is not None or len(segments) > batch
            tile = fitting_tile("of_keys of runs" if runs else "of_keys", width, memory)
            table, entries = derived_on(structure, query.device, find_entries, Blocking("keys", tile.columns), kv_heads)
            limits = table if windows is None else window_table(windows, query.device)
            bulk = descriptor_of(query, tile.rows), descriptor_of(grad.transpose(1, 2), tile.rows)
            by_tma = bulk[0] is not None and bulk[1] is not None
            numbers = *strides, *dk.stride()[:3], *dv.stride()[:3], *lse.stride()[:2]
            arguments = (
                query, key, value, grad, *(bulk if by_tma else (query, grad)), shift, sums, dk, dv,
                table, entries, limits, *numbers, *scales,
            )  # fmt: skip
            kind = (query.dtype, numbers) if even else None
            of_keys((len(entries),), arguments, {**constants, "BULK": by_tma, **tile.constants()}, kind)

            tile = fitting_tile("of_queries", width, memory)
            table, entries = derived_on(structure, query.device, find_entries, Blocking("queries", tile.rows), kv_heads)
            numbers = *strides, *dq.stride()[:3], *lse.stride()[:2]
            arguments = query, key, value, grad, shift, sums, dq, table, entries, limits, *numbers, *scales
            programs = heads // kv_heads * len(entries)
            kind = (query.dtype, numbers) if even else None
            of_queries((programs,), arguments, {**constants, **tile.constants()}, kind)
        d_sink = None
        if sink is not None:
            # d(sink) = sum of p_sink * -rowsum(dO * O), which `sums` holds
            weight = torch.exp(sink.float()[None, :, None] - lse)
            d_sink = (weight * sums).sum((0, 2)).to(sink.dtype)
        return dq, dk, dv, d_sink, None, None
