"""The launch of many queries per sequence: tables, tile sizes, output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...attention.request import AttentionRequest, AttentionResult, other_devices
from ...attention.structure import CallStructure, Segment
from ..launcher import BYTES
from ..relaunch import Relaunch
from ..windows import HeadWindows
from .shapes import Known, Shape


def blank(request: AttentionRequest, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Output and log-sum-exp to write into, every row of them."""
    query = request.query
    batch, heads, q_len, _ = query.shape
    out = query.new_empty((batch, q_len, heads, request.value.shape[3]))
    return out, query.new_empty((batch, heads, q_len), dtype=torch.float32) if need_lse else None


class Prefill:
    """Calls of a shape whose heads have the same windows: what they launch, wherever their tensors lie.

    Called by itself where there are neither learned sinks nor a log-sum-exp to write.
    """

    def __init__(self, shape: Shape, structure: CallStructure, windows: HeadWindows | None) -> None:
        """From the shape, and the windows of its heads."""
        self._shape, self._windows = shape, windows
        self._kernels, self._heavy = shape.kernels(structure, windows)
        self._forms: dict[Known, list[Relaunch]] = {}

    def __call__(
        self, structure: CallStructure, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Returns the output `[batch, q_len, heads, head_dim_v]`, for the structure that it was made for.

        Raises:
            ValueError: The tensors do not lie on one device.
        """
        if not query.get_device() == key.get_device() == value.get_device():
            raise other_devices(query, key, value)
        out = query.new_empty(self._shape.out)
        self.launch(structure, query, key, value, scaling, out)
        return out

    def launch(
        self,
        structure: CallStructure,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        out: Tensor,
        lse: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> None:
        """Writes output and log-sum-exp: one launch over all segments and heads, or two."""
        q_at, k_at, v_at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        even = not (q_at | k_at | v_at) % BYTES
        known = query.stride(), key.stride(), value.stride(), scaling, even
        runs = self._forms.get(known)
        if runs is None:
            runs = self._forms[known] = self._runs(structure, known, query, key, value, out, lse)
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

    def _runs(
        self,
        structure: CallStructure,
        known: Known,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> list[Relaunch]:
        """The launches of a call, shared by calls whose strides, alignment and factor are the same."""
        variants = self._shape.variants(self._kernels, self._heavy, known, query, key, value, out, lse)
        launches = [(variant, kernel.launch(structure, self._windows)) for kernel, variant in variants]
        return [Relaunch(variant, grid, tables) for variant, (grid, tables) in launches if grid[0]]


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
    query, value, structure = request.query, request.value, request.structure
    known = (
        "prefill", query.shape, value.shape, query.dtype, query.device, need_lse, request.sink_logits is not None,
        request.softcap,
    )  # fmt: skip
    windowed = windows is not None

    def make() -> Prefill:
        shape = structure.cached((known, windowed), lambda: Shape(request, segments, windowed, need_lse))
        return Prefill(shape, structure, windows)

    return structure.cached((known, windows), make)


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
    launches.launch(
        request.structure, query, request.key, request.value, request.scaling, out, lse, request.sink_logits
    )
    return AttentionResult(out, lse)
