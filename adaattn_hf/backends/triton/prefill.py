"""The launch of many queries per sequence: tables, tile sizes, output."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult
from ...attention.structure import Segment
from ..launcher import Launcher, aligned
from ..windows import HeadWindows
from .bulk import bulk_form, described
from .forward import forward
from .sizes import Tile, padded, scale_of
from .tables import Work, work_of

launch_forward = Launcher(forward)

# Whether the copy engine brings tiles at the edges of what queries see, where it can.
_BULK_EDGES = True
# Products of numbers from which on a call has the copy engine bring its tiles. Smaller calls gain less by it (4 to 6 us
# on an H200 at 5e9) than the host takes to describe keys and values (some 15 us).
_LEAST_PRODUCTS = 1 << 33


def blank(request: AttentionRequest, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp to write into, every row of them."""
    query = request.query
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, request.value.shape[3]))
    return out, query.new_empty((batch, heads, q_len), dtype=torch.float32) if need_lse else None


def forward_tile(pad: int, windows: bool) -> Tile:
    """For a head size; on an H200 two small programs per multiprocessor beat one large program.

    Heads of up to 64 channels without windows are the exception: a block of queries of a narrow window reads few tiles,
    of which the larger ones hold more that nobody sees.
    """
    if pad <= 64:
        return Tile(64, 64, 4, 3) if windows else Tile(128, 64, 8, 3)
    if pad <= 128:
        return Tile(64, 64, 4, 3)
    return Tile(64, 32, 4, 2)


class Form(NamedTuple):
    """What calls of one shape over one structure share: all of a launch but addresses.

    Attributes:
        work: Work tables.
        rest: The kernel's arguments behind its work table: strides and numbers.
        constants: Its constants and the compiler's options, without the copy engine and with it.
        kind: What its compiled variant depends on beside them.
        bulk: Of `bulk_form` for keys and values, None where the copy engine cannot bring them, or need not.
    """

    work: Work
    rest: tuple[Any, ...]
    constants: tuple[dict[str, Any], dict[str, Any]]
    kind: Hashable
    bulk: tuple[Any, Any] | None


def _form_of(
    request: AttentionRequest,
    query: Tensor,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    made: tuple[Tensor, Tensor | None],
) -> Form:
    """The form of a call: one for each kind of shapes, strides and numbers with which a structure is met."""
    key, value, structure, (out, lse) = request.key, request.value, request.structure, made
    sink, cap = request.sink_logits is not None, request.softcap
    strides = query.stride(), key.stride(), value.stride()
    known = (
        "prefill", windows, query.shape, value.shape, strides, query.dtype, query.device, lse is None, sink, cap,
        request.scaling,
    )  # fmt: skip

    def make() -> Form:
        heads, dim, kv_heads, value_dim = query.shape[1], query.shape[3], key.shape[1], value.shape[3]
        tile = forward_tile(max(padded(dim), padded(value_dim)), windows is not None)
        blocks, groups = (tile.rows, tile.columns), heads // kv_heads
        work = work_of("queries", structure, segments, windows, kv_heads, blocks, query.device, silent=True)
        rest = (
            work.rules, *query.stride(), *key.stride(), *value.stride(), *out.stride(),
            *(lse.stride()[:2] if lse is not None else (0, 0)), abs(scale_of(request.scaling, cap)), float(cap or 0.0),
        )  # fmt: skip
        facts: dict[str, Any] = {
            "GROUPS": groups, "DIM": dim, "DIM_V": value_dim, "PAD": padded(dim), "PAD_V": padded(value_dim),
            "CAUSAL": structure.causal, "WINDOW": windows is not None, "HAS_CAP": cap is not None, "HAS_SINK": sink,
            "HAS_LSE": lse is not None, "BULK": False, "EDGES": False, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns,
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        constants = facts, {**facts, "BULK": True, "EDGES": work.ends and _BULK_EDGES}
        kind = (
            query.dtype, *strides, out.stride(), None if lse is None else lse.stride(), aligned(work.entries),
            aligned(work.rules),
        )  # fmt: skip
        products = work.read * tile.rows * groups * (dim + value_dim)
        bulk = None
        if products >= _LEAST_PRODUCTS:
            forms = bulk_form(key, tile.columns), bulk_form(value, tile.columns)
            bulk = None if None in forms else forms
        return Form(work, rest, constants, kind, bulk)

    return structure.cached(known, make)


def attend_forward(
    request: AttentionRequest,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    keep_lse: bool = False,
) -> AttentionResult:
    """One launch over all segments and heads; `keep_lse` makes the log-sum-exp for the backward pass."""
    query, key, value, sink = request.query, request.key, request.value, request.sink_logits
    if request.scaling < 0:
        query = -query  # the kernels take the largest score by the largest product
    out, lse = blank(request, request.need_lse or keep_lse)
    form = _form_of(request, query, segments, windows, (out, lse))
    even, k_bulk, v_bulk = aligned(query, key, value), key, value
    if bulk := even and form.bulk is not None:
        k_bulk, v_bulk = described(form.bulk[0], key), described(form.bulk[1], value)
    tensors = (
        query, key, value, k_bulk, v_bulk, out, lse if lse is not None else out, sink if sink is not None else out,
        form.work.segments,
    )  # fmt: skip
    kind = form.kind if even and sink is None and query.is_cuda else None
    heads = query.shape[1] // key.shape[1]
    for entries in form.work.launches():
        launch_forward((heads, len(entries)), (*tensors, entries, *form.rest), form.constants[bulk], kind)
    return AttentionResult(out, lse)
