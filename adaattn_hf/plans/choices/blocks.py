"""Kept blocks: each row keeps the blocks of keys that hold most of its pooled attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...attention.blocks import (
    BLOCK,
    block_segments,
    keep_blocks,
    kept_keys,
    keys_of_blocks,
    picked_blocks,
    pooled_keys,
)
from ...attention.request import AttentionRequest, AttentionResult
from ...attention.segments import Segment
from ...attention.structure import CallStructure
from ...backends import select
from ..record import PlanError, real, whole
from .part import Colour, Keys, Setting, register
from .window import SINKS

MASSES = (0.95, 0.98, 0.99, 0.995)
TILE = 64
"""Query rows that share one gather of key blocks."""
DEVICE_TILE = 2048
"""The same off the CPU, where a launch costs more than the keys that a smaller tile would spare."""


@register
@dataclass(frozen=True)
class Blocks(Keys):
    """Per row, the blocks of keys that hold a share `mass` of the pooled attention; see `attention.blocks`.

    The sinks' blocks, a row's own and the one before it are always kept. Where the mask is not made of segments, all
    keys are.

    Attributes:
        mass: Share of pooled attention kept, in (0, 1).
        sinks: First keys whose blocks are always kept.
    """

    mass: float
    sinks: int = 0

    name = "blocks"
    families = ("blocks",)
    by_default = True

    def __post_init__(self) -> None:
        """Refuse a share that keeps nothing or everything."""
        if (isinstance(self.mass, float) and math.isnan(self.mass)) or not 0.0 < real(
            self.mass, "mass"
        ) < 1.0:
            raise PlanError(f"mass is {self.mass!r}, expected a share in (0, 1)")
        whole(self.sinks, "sinks")

    @property
    def label(self) -> str:
        """`p0.95`: blocks that hold 95 % of the pooled attention."""
        return f"p{self.mass:g}"

    def tinted(self, colour: Colour) -> Colour:
        """Violet."""
        return 140, 80, 160

    def head_rule(self, few: bool) -> Mapping[str, Any]:
        """A share of the pooled attention."""
        return {"mass": self.mass, "sinks": self.sinks}

    def structure(self, request: AttentionRequest) -> CallStructure:
        """The call's structure with a mask `[batch, heads, q_len, kv_len]` of the keys in kept blocks."""
        kv_heads = request.key.shape[1]
        kept = kept_keys(request, self.mass, self.sinks, range(kv_heads))
        if kept is None:
            return request.structure
        groups = request.query.shape[1] // kv_heads
        return request.structure.with_changes(mask=kept.repeat_interleave(groups, dim=1))

    def visible_rows(self, request: AttentionRequest, rows: Tensor) -> Tensor:
        """Picked by the queries of these rows alone."""
        structure, device = request.structure, request.query.device
        visible = structure.visible_rows(rows, device)[0]
        if block_segments(request) is None:
            return visible
        kv_heads, kv_len = request.key.shape[1], request.key.shape[2]
        groups = request.query.shape[1] // kv_heads
        keep = keep_blocks(
            request.query[0, :, rows].view(kv_heads, groups, len(rows), -1),
            pooled_keys(request.key[0]),
            rows.to(device) + structure.offset(),
            kv_len,
            mass=self.mass,
            sinks=self.sinks,
            scaling=request.scaling,
            causal=structure.causal,
            softcap=request.softcap,
        )
        return visible & keys_of_blocks(keep, kv_len).repeat_interleave(groups, dim=0)

    def rows_with_fewer_keys(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        """How many rows may see fewer keys: the sinks' blocks and those beside a row's own are always kept."""
        if causal:
            return max(stop - max(first, 3 * BLOCK + self.sinks), 0)
        blocks = -(-kv_len // BLOCK)
        sinks = -(-self.sinks // BLOCK)

        def may_lose(row: int) -> bool:
            own = row // BLOCK
            always = {*range(max(own - 1, 0), min(own + 2, blocks)), *range(min(sinks, blocks))}
            return len(always) < blocks

        return sum(may_lose(row) for row in range(first, stop))

    def attend(
        self, operands: AttentionRequest, original: AttentionRequest, backend: str | None
    ) -> AttentionResult:
        """One gather of kept keys per tile of rows; exact where the mask is not made of segments."""
        segments = block_segments(original)
        if segments is None:
            return select.attend(operands, backend)
        query, value = operands.query, operands.value
        batch, heads, q_len, _ = query.shape
        out = query.new_zeros(batch, q_len, heads, value.shape[3])
        lse = (
            torch.full((batch, heads, q_len), float("-inf"), device=query.device)
            if operands.need_lse
            else None
        )
        for segment in segments:
            for head in range(operands.key.shape[1]):
                self._segment_of_head(operands, original, backend, segment, head, out, lse)
        return AttentionResult(out, lse)

    def _segment_of_head(
        self,
        operands: AttentionRequest,
        original: AttentionRequest,
        backend: str | None,
        segment: Segment,
        head: int,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Writes one segment of one key/value head into `out` and `lse`."""
        groups = operands.query.shape[1] // operands.key.shape[1]
        members = slice(head * groups, (head + 1) * groups)
        keys = slice(segment.k_start, segment.k_start + segment.k_len)
        device = operands.query.device
        positions = torch.arange(segment.q_len, device=device) + segment.offset
        keep = picked_blocks(original, segment, self.mass, self.sinks, [head])[0]
        key, value = operands.key[segment.row, head, keys], operands.value[segment.row, head, keys]
        inside = torch.arange(BLOCK, device=device)
        tile = TILE if device.type == "cpu" else DEVICE_TILE
        for start in range(0, segment.q_len, tile):
            stop = min(start + tile, segment.q_len)
            used = keep[start:stop].any(0).nonzero()[:, 0]
            columns = (used[:, None] * BLOCK + inside).flatten()
            columns = columns[columns < segment.k_len]
            mask = keep[start:stop][:, columns.div(BLOCK, rounding_mode="floor")]
            if original.structure.causal:
                mask = mask & (columns <= positions[start:stop, None])
            rows = slice(segment.q_start + start, segment.q_start + stop)
            part = select.attend(
                replace(
                    operands,
                    query=operands.query[segment.row : segment.row + 1, members, rows],
                    key=key[columns][None, None],
                    value=value[columns][None, None],
                    structure=CallStructure(1, stop - start, len(columns), mask=mask[None, None]),
                    sink_logits=None if operands.sink_logits is None else operands.sink_logits[members],
                ),
                backend,
            )
            out[segment.row, rows, members] = part.out[0]
            if lse is not None and part.lse is not None:
                lse[segment.row, members, rows] = part.lse[0]

    @classmethod
    def candidates(cls, setting: Setting) -> Sequence[Blocks]:
        """From 512 tokens on, below which nearly all blocks are kept always."""
        return [cls(mass, SINKS) for mass in setting.masses] if setting.length >= 512 else []
