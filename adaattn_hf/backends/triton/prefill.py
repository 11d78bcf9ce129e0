"""The launch of many queries per sequence: tables, tile sizes, output."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult, other_devices
from ...attention.structure import Segment
from ..launcher import BYTES, Launcher, aligned
from ..relaunch import Relaunch
from ..windows import HeadWindows
from .bulk import bulk_form, described
from .forward import forward
from .sizes import Tile, padded, scale_of
from .tables import work_of

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
    """What calls share whose tensors lie alike in memory, too: all of a launch but addresses.

    Attributes:
        numbers: The kernel's arguments behind its tables: strides, factor and softcap.
        constants: Its constants and the compiler's options, by the copy engine where there is `bulk`.
        bulk: Of `bulk_form` for keys and values, None where the copy engine cannot bring them, or need not.
        again: The launches of CUDA tensors that begin at multiples of 16 bytes, with these constants.
    """

    numbers: tuple[float, ...]
    constants: dict[str, Any]
    bulk: tuple[Any, Any] | None
    again: tuple[Relaunch, ...]


class Prefill:
    """Calls of one shape, dtype and device over one structure: what they launch, wherever their tensors lie.

    Without learned sinks and a log-sum-exp it is a `FastCall`. Holds tables of a structure but not the structure, which
    keeps it, and no tensor of a call.
    """

    def __init__(
        self,
        request: AttentionRequest,
        segments: Sequence[Segment],
        windows: HeadWindows | None,
        need_lse: bool,
    ) -> None:
        """From one of the calls, the runs of its structure and the windows of its heads."""
        (batch, heads, q_len, dim), value_dim = request.query.shape, request.value.shape[3]
        structure, kv_heads, self._cap = request.structure, request.key.shape[1], request.softcap
        tile = forward_tile(max(padded(dim), padded(value_dim)), windows is not None)
        self._groups, self._columns = heads // kv_heads, tile.columns
        self._shape = batch, q_len, heads, value_dim
        self._work = work = work_of(
            "queries", structure, segments, windows, kv_heads, (tile.rows, tile.columns), request.query.device,
            silent=True,
        )  # fmt: skip
        self._heavy = work.read * tile.rows * self._groups * (dim + value_dim) >= _LEAST_PRODUCTS
        self._constants: dict[str, Any] = {
            "GROUPS": self._groups, "DIM": dim, "DIM_V": value_dim, "PAD": padded(dim), "PAD_V": padded(value_dim),
            "CAUSAL": structure.causal, "WINDOW": windows is not None, "HAS_CAP": self._cap is not None,
            "HAS_SINK": request.sink_logits is not None, "HAS_LSE": need_lse, "BULK": False, "EDGES": False,
            "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        self._forms: dict[Hashable, Form] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Returns the output `[batch, q_len, heads, head_dim_v]`.

        Raises:
            ValueError: The tensors do not lie on one device.
        """
        if not query.get_device() == key.get_device() == value.get_device():
            raise other_devices(query, key, value)
        out = query.new_empty(self._shape)
        self.launch(query, key, value, scaling, out)
        return out

    def launch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        out: Tensor,
        lse: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> None:
        """Writes output and log-sum-exp: one launch over all segments and heads, several for very many documents."""
        strides = query.stride(), key.stride(), value.stride()
        form = self._forms.get((strides, scaling))
        if form is None:
            form = self._forms[strides, scaling] = self._form(query, key, value, scaling, out, lse)
        q_at, k_at, v_at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        even = not (q_at | k_at | v_at) % BYTES
        k_bulk, v_bulk, k_bulk_at, v_bulk_at = key, value, k_at, v_at
        if bulk := even and form.bulk is not None:
            k_bulk = k_bulk_at = described(form.bulk[0], key)
            v_bulk = v_bulk_at = described(form.bulk[1], value)
        tensors = (
            query, key, value, k_bulk, v_bulk, out, out if lse is None else lse, out if sink is None else sink,
        )  # fmt: skip
        if even and form.again:
            out_at = out.data_ptr()
            lse_at = out_at if lse is None else lse.data_ptr()
            for again in form.again:
                again(tensors, (q_at, k_at, v_at, k_bulk_at, v_bulk_at, out_at, lse_at, out_at))
            return
        constants = form.constants if bulk else self._constants
        for entries in self._work.launches():
            arguments = *tensors, self._work.segments, entries, self._work.rules, *form.numbers
            launch_forward((self._groups, len(entries)), arguments, constants, None)

    def _form(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, out: Tensor, lse: Tensor | None
    ) -> Form:
        """The form of a call: one for each kind of strides and factor."""
        work, constants, cap = self._work, self._constants, self._cap
        strides = query.stride(), key.stride(), value.stride(), out.stride()
        numbers = (
            *itertools.chain(*strides), *((0, 0) if lse is None else lse.stride()[:2]), abs(scale_of(scaling, cap)),
            float(cap or 0.0),
        )  # fmt: skip
        bulk = None
        if self._heavy:
            forms = bulk_form(key, self._columns), bulk_form(value, self._columns)
            bulk = None if None in forms else forms
        if bulk is not None:
            constants = {**constants, "BULK": True, "EDGES": work.ends and _BULK_EDGES}
        # sinks come from elsewhere and may begin at any address
        if not query.is_cuda or constants["HAS_SINK"]:
            return Form(numbers, constants, bulk, ())
        kind = (
            query.dtype, *strides, None if lse is None else lse.stride(), aligned(work.entries), aligned(work.rules),
        )  # fmt: skip
        again = tuple(
            Relaunch(
                launch_forward, (self._groups, len(entries)), (work.segments, entries, work.rules), numbers, constants,
                kind,
            )
            for entries in work.launches()
        )  # fmt: skip
        return Form(numbers, constants, bulk, again)


def prefill_of(
    request: AttentionRequest, segments: Sequence[Segment], windows: HeadWindows | None, need_lse: bool
) -> Prefill:
    """What calls like a request launch, made once for their structure.

    Args:
        request: One of the calls.
        segments: The runs of its structure.
        windows: Of `head_windows`.
        need_lse: Whether the log-sum-exp is written, too.
    """
    query, value = request.query, request.value
    known = (
        "prefill", windows, query.shape, value.shape, query.dtype, query.device, need_lse,
        request.sink_logits is not None, request.softcap,
    )  # fmt: skip
    return request.structure.cached(known, lambda: Prefill(request, segments, windows, need_lse))


def attend_forward(
    request: AttentionRequest,
    segments: Sequence[Segment],
    windows: HeadWindows | None,
    keep_lse: bool = False,
) -> AttentionResult:
    """One launch over all segments and heads; `keep_lse` makes the log-sum-exp for the backward pass."""
    query = request.query
    if request.scaling < 0:
        query = -query  # the kernels take the largest score by the largest product
    out, lse = blank(request, request.need_lse or keep_lse)
    launches = prefill_of(request, segments, windows, lse is not None)
    launches.launch(query, request.key, request.value, request.scaling, out, lse, request.sink_logits)
    return AttentionResult(out, lse)
