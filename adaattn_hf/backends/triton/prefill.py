"""The launch of many queries per sequence: tables, tile sizes, output."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult, other_devices
from ...attention.structure import Segment
from ..launcher import BYTES, Launcher, aligned
from ..relaunch import Relaunch
from ..repeats import asked
from ..windows import HeadWindows
from . import hopper
from .bulk import BulkForm, bulk_form
from .forward import forward
from .reads import ends_with_tiles
from .sizes import Tile, padded, scale_of
from .tables import Kind, Work, silent_runs, work_of

launch_forward = Launcher(forward)

# Whether the copy engine brings tiles at the edges of what queries see, where it can.
_BULK_EDGES = True
# Products of numbers from which on a call has the copy engine bring its tiles. Smaller calls gain less by it (4 to 6 us
# on an H200 at 5e9) than the host takes to describe keys and values at addresses that it has not met (some 15 us).
_LEAST_PRODUCTS = 1 << 33
_COMES_AGAIN = 256
"""Launches behind which programs are to end together. To find out who computes what takes the host some 0.2 to 0.7 ms
for each layer of a plan at 8k, 3 ms for all exact layers, and saves the device some 10 us a launch: prompts of a length
that is met a few times would wait for it in vain."""
_K_BULK, _V_BULK = 3, 4
"""Where a kernel takes keys and values for the copy engine."""


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


class Way(NamedTuple):
    """A kernel for calls of one shape over one structure.

    Attributes:
        launcher: Of the kernel.
        work: Its work tables.
        launches: Grid, work entries, and last arguments of each launch: of more than one for very many documents alone.
        constants: Its constants and the compiler's options, without the copy engine.
        box: Keys and channels that the copy engine brings at once; all channels where None.
        specialised: Whether its warps have tasks of their own: then the copy engine must bring all tiles.
    """

    launcher: Launcher
    work: Work
    launches: tuple[tuple[tuple[int, ...], Tensor, tuple[int, ...]], ...]
    constants: dict[str, Any]
    box: tuple[int, int | None]
    specialised: bool


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
        query, value_dim = request.query, request.value.shape[3]
        batch, heads, q_len, dim = query.shape
        structure, kv_heads, self._cap = request.structure, request.key.shape[1], request.softcap
        groups, self._shape = heads // kv_heads, (batch, q_len, heads, value_dim)
        facts: dict[str, Any] = {
            "GROUPS": groups, "CAUSAL": structure.causal, "WINDOW": windows is not None,
            "HAS_SINK": request.sink_logits is not None, "HAS_LSE": need_lse,
        }  # fmt: skip

        silent, kv_len = silent_runs(structure, segments), structure.kv_len

        def work(
            runs: Sequence[Segment],
            rows: int,
            columns: int,
            parts: int = 0,
            pieces: int = 1,
            programs: int = 0,
        ) -> Work:
            kind = Kind("queries", (rows, columns), kv_heads, query.device, parts, pieces, programs)
            return work_of(kind, structure, runs, windows, () if parts and runs is not segments else silent)

        tile = forward_tile(max(padded(dim), padded(value_dim)), windows is not None)
        table = work(segments, tile.rows, tile.columns)
        constants = facts | {
            "DIM": dim, "DIM_V": value_dim, "PAD": padded(dim), "PAD_V": padded(value_dim),
            "HAS_CAP": self._cap is not None, "BULK": False, "EDGES": False, **tile.constants(),
        }  # fmt: skip
        # told by what it reads: its tables are made if it is launched
        self._plain_way = partial(_plain, table, groups, constants, tile.columns)
        products = tile.rows * groups * (dim + value_dim)
        self._heavy = table.read * products >= _LEAST_PRODUCTS
        self._special: Way | None = None
        self._rest: Way | None = None
        """What the kernel for Hopper leaves out: runs of fewer keys than a tile, which would reach into others."""
        able = self._heavy and dim == value_dim and self._cap is None and hopper.usable(query.device)
        warps = hopper.warps_of(dim, groups, windows is not None) if able else None
        if warps is not None:
            programs = hopper.multiprocessors(query.device)
            pieces = 1 if windows is None else 2
            keys, parts = warps.columns // pieces, groups // warps.together
            short = [
                s
                for s in segments
                if s.k_len < keys and not ends_with_tiles(s.k_start, s.k_len, keys, kv_len)
            ]
            left_out = frozenset(short)
            long = [s for s in segments if s not in left_out] if short else segments
            read = work(long, tile.rows, tile.columns)
            heavy = read.read * products >= _LEAST_PRODUCTS
            if heavy and warps.pays(read.read, read.count, tile.rows * groups, programs):
                table = work(long, warps.rows, keys, parts, pieces, programs)
                box = keys, None if windows is None else 64
                self._special = _special(warps, table, box, facts | {"HEAD": dim}, programs)
                if short:
                    table = work(short, tile.rows, tile.columns)
                    self._rest = _plain(table, groups, constants, tile.columns)
        self._forms: dict[Hashable, tuple[Relaunch, ...]] = {}
        self._left = _COMES_AGAIN

    @cached_property
    def _plain(self) -> Way:
        return self._plain_way()

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
        self._left -= 1
        if not self._left or asked():
            self._deal_again()
        q_at, k_at, v_at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        even = not (q_at | k_at | v_at) % BYTES
        known = query.stride(), key.stride(), value.stride(), scaling, even
        runs = self._forms.get(known)
        if runs is None:
            runs = self._forms[known] = self._runs(query, key, value, scaling, out, lse, even)
        tensors = (
            query,
            key,
            value,
            key,
            value,
            out,
            out if lse is None else lse,
            out if sink is None else sink,
        )
        out_at = out.data_ptr()
        addresses = q_at, k_at, v_at, k_at, v_at, out_at, out_at if lse is None else lse.data_ptr(), out_at
        for run in runs:
            run(tensors, addresses)

    def _deal_again(self) -> None:
        """Has items dealt out evenly from now on; captured graphs go on by their table, which its sheet keeps."""
        way = self._special
        work = None if way is None else way.work.again()
        if way is None or work is None:
            return
        if torch.cuda.is_current_stream_capturing():  # nothing can be copied to the device now
            self._left = max(self._left, 1)
            return
        launches = tuple(
            (grid, items, last) for (grid, _, last), items in zip(way.launches, work.launches(), strict=True)
        )
        self._special = way._replace(work=work, launches=launches)
        self._forms.clear()

    def _runs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        out: Tensor,
        lse: Tensor | None,
        even: bool,
    ) -> tuple[Relaunch, ...]:
        """The launches of a call, by the copy engine where it can bring keys and values, and pays.

        They are shared by calls whose strides, alignment and factor are the same.
        """
        strides = query.stride(), key.stride(), value.stride(), out.stride()
        way, bulk, rest = self._special, None, self._rest
        in_lines = query.stride(3) == 1 and not any(step % 16 for step in query.stride()[:3])
        if even and way is not None and in_lines:
            bulk = _forms_of(key, value, way.box, hopper.layout())
        if way is None or bulk is None:
            way, rest = self._plain, None
            bulk = _forms_of(key, value, way.box, None) if even and self._heavy else None
        numbers = (
            *itertools.chain(*strides), *((0, 0) if lse is None else lse.stride()[:2]),
            abs(scale_of(scaling, self._cap)), float(self._cap or 0.0),
        )  # fmt: skip
        kind: Hashable | None = None
        # learned sinks come from elsewhere, and begin at any address
        if even and query.is_cuda and not way.constants["HAS_SINK"]:
            kind = query.dtype, *strides, None if lse is None else lse.stride()
        runs = _relaunches(way, bulk, numbers, kind)
        return runs if rest is None else (*runs, *_relaunches(rest, None, numbers, kind))


def _relaunches(
    way: Way, bulk: tuple[BulkForm, BulkForm] | None, numbers: tuple[Any, ...], kind: Hashable | None
) -> tuple[Relaunch, ...]:
    """The launches of a kernel; `kind` is None where Triton is to look for the compiled one each time."""
    constants, tables = way.constants, way.work.tables
    if bulk is not None and not way.specialised:
        constants = {**constants, "BULK": True, "EDGES": way.work.ends and _BULK_EDGES}
    if kind is not None:
        kind = kind, aligned(tables.entries), aligned(tables.rules)
    forms = {} if bulk is None else {_K_BULK: bulk[0], _V_BULK: bulk[1]}
    return tuple(
        Relaunch(
            way.launcher, grid, tables._replace(entries=entries), (*numbers, *last), constants, kind, forms
        )
        for grid, entries, last in way.launches
    )


def _plain(work: Work, groups: int, constants: dict[str, Any], columns: int) -> Way:
    """The kernel for all devices: a program for each entry and query head of its group."""
    launches = tuple(((groups, len(entries)), entries, ()) for entries in work.launches())
    return Way(launch_forward, work, launches, constants, (columns, None), False)


def _special(
    warps: hopper.Warps, work: Work, box: tuple[int, int | None], facts: dict[str, Any], programs: int
) -> Way:
    """The kernel for Hopper: so many programs compute its items in turn."""
    constants = facts | {
        "TOGETHER": warps.together, "GROUPS_OF_WARPS": warps.groups, "ALTERNATE": warps.alternate,
        "AHEAD": warps.ahead, "CLOSE": not work.ends, "BLOCK_N": warps.columns, "STAGES": warps.stages, "num_warps": 4,
    }  # fmt: skip
    launches = tuple(((min(programs, len(items)),), items, (len(items),)) for items in work.launches())
    return Way(hopper.launch_specialised(), work, launches, constants, box, True)


def _forms_of(
    key: Tensor, value: Tensor, box: tuple[int, int | None], layout: Any
) -> tuple[BulkForm, BulkForm] | None:
    """What descriptors of keys and values say, None where the copy engine cannot take either."""
    of_key, of_value = bulk_form(key, *box, layout=layout), bulk_form(value, *box, layout=layout)
    return None if of_key is None or of_value is None else (of_key, of_value)


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
