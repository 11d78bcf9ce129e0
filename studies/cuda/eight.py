"""Scores in int8: a kernel that is no part of the package, beside the same kernel in 16 bits with the same tiles.

Queries and smoothed keys are rounded per token and head (one scale for each row), their products are sums in int32, and
weights times values stay in 16 bits (SageAttention's first form, Zhang et al. 2024). A plan may take it only where it
pays; the bound by the device's peaks stands in the row: of two equal products one would run at int8's rate.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaattn_hf.backends.triton.bulk import bulk_of
from adaattn_hf.backends.triton.steps import columns_of, rows_of, step_of_all, visible

from .measure import DEVICE, DIM, DTYPE, HEADS, KV_HEADS, ON_CUDA, Cell, Section, draw, length, microseconds

TILES = (
    (64, 64, 4, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (64, 128, 4, 2),
)
PAYS = 1.15


@triton.jit
def attention(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_bulk, v_bulk, q_scale_ptr, k_scale_ptr, out_ptr, n_len, scale, blocks,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, INT8: tl.constexpr, BULK: tl.constexpr,
    SPECIALISED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Causal attention of one block of queries; tensors are contiguous `[heads, n, DIM]`, longest blocks first."""
    head = tl.program_id(0) % HEADS
    first = (blocks - 1 - tl.program_id(0) // HEADS) * BLOCK_M
    kv_head = head // GROUPS
    i = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM)
    q = rows_of(q_ptr + head.to(tl.int64) * n_len * DIM, i, d, DIM, 1, n_len, DIM, DIM, False)
    k_base = k_ptr + kv_head.to(tl.int64) * n_len * DIM
    v_base = v_ptr + kv_head.to(tl.int64) * n_len * DIM
    row_scale = tl.full([BLOCK_M], 1.0, tl.float32) * scale
    if INT8:
        row_scale = row_scale * tl.load(q_scale_ptr + head * n_len + i, mask=i < n_len, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    all_stop = (first + 1) // BLOCK_N * BLOCK_N
    for n in tl.range(0, all_stop, BLOCK_N, warp_specialize=SPECIALISED):
        j = n + tl.arange(0, BLOCK_N)
        if BULK:
            k = k_bulk.load([0, kv_head, n, 0]).reshape(BLOCK_N, DIM).T
            v = v_bulk.load([0, kv_head, n, 0]).reshape(BLOCK_N, DIM)
        else:
            k = columns_of(k_base, j, d, DIM, 1, n_len, DIM, DIM, True)
            v = rows_of(v_base, j, d, DIM, 1, n_len, DIM, DIM, True)
        if INT8:
            s = tl.dot(q, k).to(tl.float32) * tl.load(k_scale_ptr + kv_head * n_len + j)[None, :]
            s = s * row_scale[:, None]
            top = tl.maximum(m, tl.max(s, 1))
            w = tl.exp2(s - top[:, None])
            decay = tl.exp2(m - top)
            l = l * decay + tl.sum(w, 1)
            acc = tl.dot(w.to(v.dtype), v, acc * decay[:, None])
            m = top
        else:
            acc, m, l = step_of_all(acc, m, l, tl.dot(q, k), v, scale)
    for n in range(all_stop, tl.minimum(n_len, first + BLOCK_M), BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        k = columns_of(k_base, j, d, DIM, 1, n_len, DIM, DIM, False)
        v = rows_of(v_base, j, d, DIM, 1, n_len, DIM, DIM, False)
        if INT8:
            s = (
                tl.dot(q, k).to(tl.float32)
                * tl.load(k_scale_ptr + kv_head * n_len + j, mask=j < n_len, other=0.0)[None, :]
            )
            s = s * row_scale[:, None]
        else:
            s = tl.dot(q, k) * scale
        s = tl.where(visible(i, j, n_len, 0, 0, True, False), s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        w = tl.exp2(s - top[:, None])
        decay = tl.exp2(m - top)
        l = l * decay + tl.sum(w, 1)
        acc = tl.dot(w.to(v.dtype), v, acc * decay[:, None])
        m = top
    out = out_ptr + head.to(tl.int64) * n_len * DIM + i[:, None] * DIM + d[None, :]
    tl.store(out, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=(i < n_len)[:, None])


def rounded(x: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 rows of `[heads, n, dim]`, less a mean of the head, and their fp32 scales `[heads, n]`."""
    x = x.float() if mean is None else x.float() - mean
    scale = x.abs().amax(2).clamp(min=1e-20) / 127
    return (x / scale[..., None]).round().to(torch.int8), scale


def launch(
    q: Any, k: Any, v: Tensor, tile: tuple[int, int, int, int], scaling: float, specialised: bool = False
) -> Tensor:
    """Attention of 16-bit tensors, or of `(codes, scales)` of queries and keys; `specialised`: warps with tasks."""
    eight = isinstance(q, tuple)
    codes_q, q_scale = q if eight else (q, v)
    codes_k, k_scale = k if eight else (k, v)
    heads, n, dim = codes_q.shape
    out = torch.empty((heads, n, dim), dtype=v.dtype, device=v.device)
    rows, columns, warps, stages = tile
    k_bulk, v_bulk = _bulk(codes_k, columns), bulk_of(v[None], columns)
    bulk = k_bulk is not None and v_bulk is not None
    blocks = -(-n // rows)
    attention[(blocks * heads,)](
        codes_q, codes_k, v, k_bulk if bulk else codes_k, v_bulk if bulk else v, q_scale, k_scale, out,
        n, scaling * 1.4426950408889634, blocks, GROUPS=heads // codes_k.shape[0], HEADS=heads, DIM=dim, INT8=eight,
        BULK=bulk, SPECIALISED=specialised, BLOCK_M=rows, BLOCK_N=columns, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _bulk(codes: Tensor, rows: int) -> Any:
    """A descriptor of tiles of codes or numbers."""
    if codes.dtype != torch.int8:
        return bulk_of(codes[None], rows)
    from triton.tools.tensor_descriptor import TensorDescriptor

    whole = codes[None]
    return TensorDescriptor(whole, list(whole.shape), list(whole.stride()), [1, 1, rows, whole.shape[3]])


def eight(section: Section) -> None:
    """Both kernels at each tile, and what rounding takes."""
    for thousand in (8, 32):
        n = length(thousand * 1024)
        q, k, v = (draw(1, n, h)[0].contiguous() for h in (HEADS, KV_HEADS, KV_HEADS))

        def cell(
            row: Cell, tile: tuple[int, int, int, int], q: Tensor = q, k: Tensor = k, v: Tensor = v
        ) -> None:
            _both(row, tile, q, k, v)

        for tile in TILES if ON_CUDA else TILES[:1]:
            section.add(f"{thousand}k, tile {tile}", lambda row, tile=tile, cell=cell: cell(row, tile))  # type: ignore[misc]
        section.add(f"{thousand}k, rounding queries and keys", lambda row, q=q, k=k: _rounding(row, q, k))  # type: ignore[misc]
    section.add("8192³ products", _bound)


def _both(row: Cell, tile: tuple[int, int, int, int], q: Tensor, k: Tensor, v: Tensor) -> None:
    scaling, n = DIM**-0.5, q.shape[1]
    row["FLOP"] = 2.0 * HEADS * n * n * DIM
    row["bf16"] = microseconds(lambda: launch(q, k, v, tile, scaling))
    codes = rounded(q), rounded(k, k.float().mean(1, keepdim=True))
    row["int8 scores"] = microseconds(lambda: launch(*codes, v, tile, scaling))
    exact = launch(q, k, v, tile, scaling).float()
    error = (launch(*codes, v, tile, scaling).float() - exact).abs().max() / exact.abs().max()
    row["note"] = (
        f"int8 against 16 bits, of the largest output: {float(error):.1e}; asked for: {PAYS} times bf16's speed"
    )


def _rounding(row: Cell, q: Tensor, k: Tensor) -> None:
    """What it takes to make the codes, by torch operations compiled into few kernels."""
    make = torch.compile(rounded) if ON_CUDA else rounded
    mean = k.float().mean(1, keepdim=True)
    row["int8 scores"] = microseconds(lambda: (make(q), make(k, mean)))


def _bound(row: Cell) -> None:
    """The most that int8 scores can be worth: half of the work at the rate of an int8 product."""
    n = 8192 if ON_CUDA else 64
    a = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    codes = torch.randint(-127, 127, (n, n), device=DEVICE, dtype=torch.int8)
    row["FLOP"] = 2.0 * n**3
    row["bf16"] = microseconds(lambda: a @ a)
    row["int8 scores"] = microseconds(lambda: torch._int_mm(codes, codes.T.contiguous().T))
    row["note"] = (
        f"at most {2 / (1 + row['int8 scores'] / row['bf16']):.2f} times, if products alone took time"
    )
