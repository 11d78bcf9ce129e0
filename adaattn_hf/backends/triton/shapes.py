"""What calls of one shape share, such as the layers of a model: which kernels serve them, and with which constants."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.request import AttentionRequest
from ...attention.structure import CallStructure, Segment
from ..launcher import Launcher
from ..relaunch import Variant
from ..windows import HeadWindows
from . import hopper
from .bulk import BulkForm, bulk_form
from .forward import forward
from .sizes import padded, scale_of, tile_on
from .tables import (
    Cut,
    Dealing,
    ends_with_tiles,
    exact_windows,
    find_entries,
    find_items,
    find_runs,
    made,
    pairs_seen,
    runs_of,
    window_table,
)

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
        cut: The blocks of queries of its runs.
        constants: Its constants and the compiler's options, without the copy engine.
        box: Keys and channels that the copy engine brings at once; all channels where None.
        device: Of all tensors.
        kv_heads: Key/value heads.
        groups: Query heads per key/value head.
        dealing: What is dealt out to programs that compute all items in turn, by warps with tasks of their own, for
            which the copy engine must bring all tiles; None where each entry and query head of its group has a program.
    """

    launcher: Launcher
    cut: Cut
    constants: dict[str, Any]
    box: tuple[int, int | None]
    device: torch.device
    kv_heads: int
    groups: int
    dealing: Dealing | None = None

    def launch(
        self, structure: CallStructure, windows: HeadWindows | None
    ) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
        """Grid and work tables: runs, entries or items, windows."""
        cut, device = self.cut, self.device
        runs = made(structure, device, find_runs, cut.least, cut.short)
        if self.dealing is None:
            entries = made(structure, device, find_entries, cut, self.kv_heads)
            grid = (self.groups * len(entries),)
        else:
            every = windows or exact_windows(self.kv_heads)
            entries, programs = made(structure, device, find_items, cut, self.dealing, every)
            grid = (programs,)
        return grid, (runs, entries, entries if windows is None else window_table(windows, device))


class _Special(NamedTuple):
    """Calls by the kernel for Hopper.

    Attributes:
        warps: How it shares its work out.
        kernels: It, and the plain one for what it leaves out, if anything: runs of fewer keys than a tile, which would
            reach into others.
    """

    warps: hopper.Warps
    kernels: tuple[Kernel, ...]


class Shape:
    """Calls of one shape, dtype and device over one structure, whatever windows their heads have.

    Holds tables of a structure but not the structure, which keeps it, and no tensor of a call.

    Attributes:
        out: `batch, q_len, heads, head_dim_v`.
        plain: The kernel for all devices.
        closed: Whether the keys of every run end with one of its tiles or with the tensor.
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
        self._products = groups * (dim + value_dim)
        kv_heads, structure = request.key.shape[1], request.structure
        cut = Cut("queries", tile.rows)
        self.plain = Kernel(
            launch_forward, cut, constants, (tile.columns, None), query.device, kv_heads, groups
        )
        self.closed = all(ends_with_tiles(run, tile.columns, structure.kv_len) for run in segments)
        self._special: _Special | None = None
        # windows only ever take keys away
        able = (
            dim == value_dim
            and self._cap is None
            and self._is_heavy(pairs_seen(structure, exact_windows(kv_heads)))
        )
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
        whole = [run for run in segments if run.k_len >= keys or ends_with_tiles(run, keys, kv_len)]
        if not whole:
            return None
        cut = Cut("queries", warps.rows, least=keys)
        constants = facts | {
            "TOGETHER": warps.together, "GROUPS_OF_WARPS": warps.groups, "ALTERNATE": warps.alternate,
            "AHEAD": warps.ahead, "CLOSE": not all(ends_with_tiles(run, keys, kv_len) for run in whole),
            "BLOCK_N": warps.columns, "STAGES": warps.stages, "num_warps": 4,
        }  # fmt: skip
        box = keys, 64 if windowed else None
        dealing = Dealing(groups // warps.together, keys, pieces, programs)
        special = Kernel(
            hopper.launch_specialised(), cut, constants, box, device, self.plain.kv_heads, groups, dealing
        )
        if len(whole) == len(segments):
            return _Special(warps, (special,))
        left_out = self.plain.cut._replace(least=keys, short=True)
        return _Special(warps, (special, self.plain._replace(cut=left_out)))

    def _is_heavy(self, pairs: int) -> bool:
        """Whether heads that see so many pairs of queries and keys compute so much that the copy engine pays."""
        return pairs * self._products >= _LEAST_PRODUCTS

    def kernels(
        self, structure: CallStructure, windows: HeadWindows | None
    ) -> tuple[tuple[Kernel, ...], bool]:
        """Those that compute a call together, and whether it is so much that the copy engine pays.

        They are the kernel for Hopper where it pays, and the plain one for what that leaves out; or the plain one.
        """
        special, every = self._special, windows or exact_windows(self.plain.kv_heads)
        heavy = self._is_heavy(pairs_seen(structure, every))
        if heavy and special is not None:
            kernel = special.kernels[0]
            pairs = pairs_seen(structure, every, kernel.cut.least)
            queries = sum(run.q_len for run in structure.derived(runs_of, kernel.cut.least)) * kernel.kv_heads
            programs = kernel.dealing.programs if kernel.dealing else 0
            if self._is_heavy(pairs) and special.warps.pays(pairs, queries, kernel.groups, programs):
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
        asked = kernels[0].dealing, heavy, known
        if asked in self._variants:
            return self._variants[asked]
        *strides, scaling, even = *known[:3], out.stride(), *known[3:]
        bulk: Bulk | None = None
        if kernels[0].dealing:
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
        found = [(first, _variant(first, bulk, self.closed, numbers, kind))]
        found += [(one, _variant(one, None, self.closed, numbers, kind)) for one in others]
        self._variants[asked] = found
        return found


def _variant(
    kernel: Kernel, bulk: Bulk | None, closed: bool, numbers: tuple[Any, ...], kind: Hashable | None
) -> Variant:
    """The kernel as it is launched; `kind` is None where Triton is to look for the compiled one each time."""
    constants = kernel.constants
    if bulk is not None and kernel.dealing is None:
        constants = {**constants, "BULK": True, "EDGES": closed and _BULK_EDGES}
    forms = {} if bulk is None else {_K_BULK: bulk[0], _V_BULK: bulk[1]}
    return Variant(kernel.launcher, numbers, constants, kind, forms)


def _forms_of(key: Tensor, value: Tensor, box: tuple[int, int | None], layout: Any) -> Bulk | None:
    """What descriptors of keys and values say, None where the copy engine cannot take either."""
    of_key, of_value = bulk_form(key, *box, layout=layout), bulk_form(value, *box, layout=layout)
    return None if of_key is None or of_value is None else (of_key, of_value)
