"""What calls of one shape share, such as the layers of a model: which kernels serve them, and with which constants."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...attention.request import AttentionRequest
from ...attention.structure import Segment
from ..launcher import Launcher
from ..relaunch import Variant
from ..windows import HeadWindows
from . import hopper
from .bulk import BulkForm, bulk_form
from .forward import forward
from .reads import ends_with_tiles
from .sizes import padded, scale_of, tile_on
from .tables import Kind, Sheet, Tables, sheet_of, silent_runs

launch_forward = Launcher(forward)

# Whether the copy engine brings tiles at the edges of what queries see, where it can.
_BULK_EDGES = True
# Products of numbers from which on a call has the copy engine bring its tiles. Smaller calls gain less by it (4 to 6 us
# on an H200 at 5e9) than the host takes to describe keys and values at addresses that it has not met (some 15 us).
_LEAST_PRODUCTS = 1 << 33
_K_BULK, _V_BULK = 3, 4
"""Where a kernel takes keys and values for the copy engine."""

Bulk = tuple[BulkForm, BulkForm]
"""What descriptors of keys and values say."""
Known = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float, bool]
"""Strides of queries, keys and values, factor of the scores, and whether all three begin at multiples of 16 bytes."""


class Kernel(NamedTuple):
    """A kernel that serves calls of one shape over some runs of their structure, for heads of any windows.

    Attributes:
        launcher: Of the kernel.
        sheet: Tables of its runs.
        constants: Its constants and the compiler's options, without the copy engine.
        box: Keys and channels that the copy engine brings at once; all channels where None.
        groups: Query heads per key/value head.
        programs: That compute all items in turn, by warps with tasks of their own, for which the copy engine must bring
            all tiles; 0 where there is a program for each entry and query head of its group.
    """

    launcher: Launcher
    sheet: Sheet
    constants: dict[str, Any]
    box: tuple[int, int | None]
    groups: int
    programs: int = 0

    def launches(self, tables: Tables) -> list[tuple[tuple[int, ...], Tensor, tuple[int, ...]]]:
        """Grid, entries and last arguments of each launch: of more than one for very many documents alone."""
        if self.programs:
            counted = [(items, items.shape[0]) for items in tables.launches()]
            return [((min(self.programs, count),), items, (count,)) for items, count in counted]
        return [((self.groups, entries.shape[0]), entries, ()) for entries in tables.launches()]


class _Special(NamedTuple):
    """Calls by the kernel for Hopper.

    Attributes:
        warps: How it shares its work out.
        kernels: It, and the plain one for what it leaves out, if anything: runs of fewer keys than a tile, which would
            reach into others.
        plain: The blocks of the plain kernel over its runs, which tell whether it pays.
    """

    warps: hopper.Warps
    kernels: tuple[Kernel, ...]
    plain: Sheet


class Shape:
    """Calls of one shape, dtype and device over one structure, whatever windows their heads have.

    Holds tables of a structure but not the structure, which keeps it, and no tensor of a call.

    Attributes:
        out: `batch, q_len, heads, head_dim_v`.
        plain: The kernel for all devices.
    """

    def __init__(
        self, request: AttentionRequest, segments: Sequence[Segment], windowed: bool, need_lse: bool
    ) -> None:
        """From one of the calls, the runs of its structure, and whether some head has a window."""
        query, value_dim = request.query, request.value.shape[3]
        batch, heads, q_len, dim = query.shape
        self.out = batch, q_len, heads, value_dim
        self._cap, groups = request.softcap, heads // request.key.shape[1]
        facts: dict[str, Any] = {
            "GROUPS": groups, "CAUSAL": request.structure.causal, "WINDOW": windowed,
            "HAS_SINK": request.sink_logits is not None, "HAS_LSE": need_lse,
        }  # fmt: skip
        width = max(padded(dim), padded(value_dim)) * query.itemsize
        tile = tile_on("forward of windows" if windowed else "forward", width, query.device)
        constants = facts | {
            "DIM": dim, "DIM_V": value_dim, "PAD": padded(dim), "PAD_V": padded(value_dim),
            "HAS_CAP": self._cap is not None, "BULK": False, "EDGES": False, **tile.constants(),
        }  # fmt: skip
        self._rows = tile.rows * groups
        self._products = self._rows * (dim + value_dim)
        sheet = _sheet(request, segments, segments, (tile.rows, tile.columns))
        self.plain = Kernel(launch_forward, sheet, constants, (tile.columns, None), groups)
        self._special: _Special | None = None
        # windows only ever take keys away
        able = self._is_heavy(sheet.read(None)) and dim == value_dim and self._cap is None
        if able and hopper.usable(query.device):
            self._special = self._for_hopper(request, segments, windowed, facts | {"HEAD": dim})
        self._variants: dict[Hashable, list[tuple[Kernel, Variant]]] = {}

    def _for_hopper(
        self, request: AttentionRequest, segments: Sequence[Segment], windowed: bool, facts: dict[str, Any]
    ) -> _Special | None:
        groups, device, kv_len = self.plain.groups, request.query.device, request.structure.kv_len
        warps = hopper.warps_of(request.query.shape[3], groups, windowed)
        if warps is None:
            return None
        pieces = 2 if windowed else 1
        keys, programs = warps.columns // pieces, hopper.multiprocessors(device)
        short = [
            s for s in segments if s.k_len < keys and not ends_with_tiles(s.k_start, s.k_len, keys, kv_len)
        ]
        if len(short) == len(segments):
            return None
        left_out = frozenset(short)
        runs = [s for s in segments if s not in left_out] if short else segments
        dealt = groups // warps.together, pieces, programs
        sheet = _sheet(request, segments, runs, (warps.rows, keys), *dealt)
        constants = facts | {
            "TOGETHER": warps.together, "GROUPS_OF_WARPS": warps.groups, "ALTERNATE": warps.alternate,
            "AHEAD": warps.ahead, "CLOSE": not sheet.ends, "BLOCK_N": warps.columns, "STAGES": warps.stages,
            "num_warps": 4,
        }  # fmt: skip
        box = keys, 64 if windowed else None
        kernels = [Kernel(hopper.launch_specialised(), sheet, constants, box, groups, programs)]
        plain, blocks = self.plain.sheet, self.plain.sheet.kind.blocks
        if short:
            plain = _sheet(request, segments, runs, blocks)
            kernels.append(self.plain._replace(sheet=_sheet(request, segments, short, blocks)))
        return _Special(warps, tuple(kernels), plain)

    def _is_heavy(self, read: int) -> bool:
        """Whether blocks of the plain kernel that read so many keys compute so much that the copy engine pays."""
        return read * self._products >= _LEAST_PRODUCTS

    def kernels(self, windows: HeadWindows | None) -> tuple[tuple[Kernel, ...], bool]:
        """Those that compute a call together, and whether it is so much that the copy engine pays.

        They are the kernel for Hopper where it pays, and the plain one for what that leaves out; or the plain one.
        """
        read, special = self.plain.sheet.read(windows), self._special
        heavy = self._is_heavy(read)
        if heavy and special is not None:
            if special.plain is not self.plain.sheet:
                read = special.plain.read(windows)
            programs = special.kernels[0].programs
            if self._is_heavy(read) and special.warps.pays(read, special.plain.count, self._rows, programs):
                return special.kernels, heavy
        return (self.plain,), heavy

    def variants(
        self,
        kernels: tuple[Kernel, ...],
        heavy: bool,
        known: Known,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> list[tuple[Kernel, Variant]]:
        """What calls by these kernels launch: by the copy engine where it can bring keys and values, and pays.

        Args:
            kernels: Of `kernels`.
            heavy: As it says.
            known: Of the call.
            query: Of one of them.
            key: Of the same.
            value: Of the same.
            out: Its output.
            lse: Its log-sum-exp, if that is written.
        """
        asked = kernels[0].programs, heavy, known
        if asked in self._variants:
            return self._variants[asked]
        *strides, scaling, even = *known[:3], out.stride(), *known[3:]
        bulk: Bulk | None = None
        if kernels[0].programs:
            in_lines = query.stride(3) == 1 and not any(step % 16 for step in query.stride()[:3])
            if even and in_lines:
                bulk = _forms_of(key, value, kernels[0].box, hopper.layout())
            if bulk is None:
                kernels = (self.plain,)
        if bulk is None and even and heavy:
            bulk = _forms_of(key, value, kernels[0].box, None)
        numbers = (
            *itertools.chain(*strides), *((0, 0) if lse is None else lse.stride()[:2]),
            abs(scale_of(scaling, self._cap)), float(self._cap or 0.0),
        )  # fmt: skip
        kind: Hashable | None = None
        # learned sinks come from elsewhere, and begin at any address
        if even and query.is_cuda and not self.plain.constants["HAS_SINK"]:
            kind = query.dtype, *strides, None if lse is None else lse.stride()
        first, *others = kernels
        found = [(first, _variant(first, bulk, numbers, kind))]
        found += [(one, _variant(one, None, numbers, kind)) for one in others]
        self._variants[asked] = found
        return found


def _sheet(
    request: AttentionRequest,
    segments: Sequence[Segment],
    runs: Sequence[Segment],
    blocks: tuple[int, int],
    *dealt: int,
) -> Sheet:
    """The blocks of queries of some of a structure's segments, and of those without keys."""
    structure, key = request.structure, request.key
    kind = Kind("queries", blocks, key.shape[1], key.device, *dealt)
    # where some are left to another kernel, that computes those without keys, too
    silent = () if dealt and runs is not segments else structure.derived(silent_runs)
    return sheet_of(kind, structure, runs, silent)


def _variant(kernel: Kernel, bulk: Bulk | None, numbers: tuple[Any, ...], kind: Hashable | None) -> Variant:
    """The kernel as it is launched; `kind` is None where Triton is to look for the compiled one each time."""
    constants = kernel.constants
    if bulk is not None and not kernel.programs:
        constants = {**constants, "BULK": True, "EDGES": kernel.sheet.ends and _BULK_EDGES}
    forms = {} if bulk is None else {_K_BULK: bulk[0], _V_BULK: bulk[1]}
    return Variant(kernel.launcher, numbers, constants, kind, forms)


def _forms_of(key: Tensor, value: Tensor, box: tuple[int, int | None], layout: Any) -> Bulk | None:
    """What descriptors of keys and values say, None where the copy engine cannot take either."""
    of_key, of_value = bulk_form(key, *box, layout=layout), bulk_form(value, *box, layout=layout)
    return None if of_key is None or of_value is None else (of_key, of_value)
