"""Watching a planned model while it runs: counters, and sampled exact rows that say what the plan leaves out.

Counters say how often each layer ran, and what share of (token, query head) pairs the plan changed. The
monitor, asked for by `monitoring`, computes a few rows of each prefill exactly, compares log-sum-exps
(dropped mass = 1 - exp(lse_kept - lse_all)), turns them into a predicted KL by the ratio learned in
calibration, and makes a unit exact for the rest of the session when it drops more than three times its
calibrated 95th percentile. It warns once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf import attach, execute
from adaattn_hf.approximate import Program, heads_of, windowed
from adaattn_hf.arms import exact_tap
from adaattn_hf.backends.eager import EagerBackend
from adaattn_hf.fisher import row_visible
from adaattn_hf.plan import EXACT, Plan, UnitRecord
from adaattn_hf.request import AttentionRequest
from adaattn_hf.selection import keep_blocks, keys_of_blocks, pooled_keys
from adaattn_hf.structure import CallStructure
from adaattn_hf.tap import tapping

logger = logging.getLogger("adaattn_hf")

ROW_SHARE = 1024
"""One row of this many is computed exactly: below 0.1 % of exact attention's work."""
LEAST_ROWS = 8
"""Rows seen before a unit may be judged."""


@dataclass
class LayerStatistics:
    """Counters of one layer.

    Attributes:
        layer: Layer index.
        calls: Attention calls.
        pairs: (token, query head) pairs computed.
        changed: Pairs that the plan computed otherwise than stock.
        fewer_keys: Pairs that saw fewer keys than stock.
        rows: Rows that the monitor computed exactly, per key/value head.
        dropped_mass: Mean dropped mass on these rows, per key/value head.
        predicted_kl: Predicted KL of the layer from these rows, nats/token.
        tightened: Key/value heads that the monitor made exact.
    """

    layer: int
    calls: int = 0
    pairs: int = 0
    changed: int = 0
    fewer_keys: int = 0
    rows: int = 0
    dropped_mass: list[float] = field(default_factory=list)
    predicted_kl: float = 0.0
    tightened: list[int] = field(default_factory=list)

    @property
    def activation(self) -> float:
        """Share of pairs that the plan computed otherwise than stock."""
        return self.changed / self.pairs if self.pairs else 0.0


class Monitor:
    """Answers attention calls by the plan and counts; see `monitoring`.

    Attributes:
        layers: Counters by layer index.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, *, sample_rows: bool = True, factor: float = 3.0
    ) -> None:
        self.layers: dict[int, LayerStatistics] = {}
        self._plan, self._sample, self._factor = plan, sample_rows, factor
        self._units: Mapping[tuple[int, int], UnitRecord] = {
            (unit.layer, unit.head): unit for unit in plan.units
        }
        self._sums: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}
        self._programs: dict[int, Program] = {}
        self._warned = False
        self._modules = {id(module) for _, module in attach.attention_modules(model, plan.model_type)}

    def tap(self, module: nn.Module, request: AttentionRequest) -> Tensor:
        """Answers one call by the plan, tightened where the monitor said so."""
        if id(module) not in self._modules:
            return exact_tap(module, request)
        index = int(module.layer_idx)  # type: ignore[arg-type]
        counters = self.layers.setdefault(index, LayerStatistics(index))
        program = self._programs.get(index) or attach.program_of(module)
        counters.calls += 1
        batch, heads, q_len, _ = request.query.shape
        counters.pairs += batch * heads * q_len
        if program is None:
            return exact_tap(module, request)
        self._count(counters, program, request)
        if self._sample and q_len >= 64 and batch == 1 and request.structure.plain:
            program = self._look(counters, program, request)
        return execute.attend(program, request).out

    def _count(self, counters: LayerStatistics, program: Program, request: AttentionRequest) -> None:
        batch, heads, q_len, _ = request.query.shape
        group = batch * heads // request.key.shape[1]
        structure = request.structure
        first = (
            structure.q_offset if isinstance(structure.q_offset, int) else max(structure.kv_len - q_len, 0)
        )
        stop = min(first + q_len, program.max_length)
        rows = max(stop - first, 0)
        for choice in program.plan.choices:
            beyond = choice.window + choice.sinks if choice.kind == "window" else 192 + choice.sinks
            fewer = max(stop - max(first, beyond), 0) if choice.kind != "exact" else 0
            counters.fewer_keys += group * fewer
            counters.changed += group * (rows if choice.rank or choice.precision != "model" else fewer)

    def _look(self, counters: LayerStatistics, program: Program, request: AttentionRequest) -> Program:
        """Compares a few rows with exact attention; returns the program, tightened where it must be."""
        q_len = request.query.shape[2]
        count = max(1, q_len // ROW_SHARE)
        rows = torch.linspace(q_len // (2 * count), q_len - 1, count).long()
        dropped = dropped_mass(program, request, rows)
        mass, square = dropped.sum(-1), dropped.square().sum(-1)
        index = counters.layer
        self._sums[index] = self._sums[index] + mass if index in self._sums else mass
        self._squares[index] = self._squares[index] + square if index in self._squares else square
        counters.rows += count
        mean = (self._sums[index] / counters.rows).tolist()
        second = (self._squares[index] / counters.rows).tolist()
        counters.dropped_mass = mean
        units = [self._units.get((index, head)) for head in range(len(mean))]
        counters.predicted_kl = sum(
            unit.risk * value / unit.dropped_square
            for unit, value in zip(units, second, strict=True)
            if unit is not None and unit.dropped_square > 0
        )
        if counters.rows < LEAST_ROWS:
            return program
        loud = [
            head
            for head, unit in enumerate(units)
            if unit is not None
            and program.plan.choices[head].kind != "exact"
            and mean[head] > self._factor * max(unit.dropped_mass_p95, 1e-4)
        ]
        if not loud:
            return program
        counters.tightened = sorted({*counters.tightened, *loud})
        choices = tuple(EXACT if head in loud else c for head, c in enumerate(program.plan.choices))
        self._programs[index] = replace(program, plan=replace(program.plan, choices=choices))
        if not self._warned:
            self._warned = True
            logger.warning(
                "adaattn: layer %d head %d drops %.3g of its attention here, above %g times what calibration saw; "
                "it is exact from here on (and so is every other that does). Calibrate on text like this one.",
                index, loud[0], mean[loud[0]], self._factor,
            )  # fmt: skip
        return self._programs[index]


@torch.no_grad()
def dropped_mass(program: Program, request: AttentionRequest, rows: Tensor) -> Tensor:
    """Returns the attention weight that the plan leaves out on a few rows, `[num_kv_heads, rows]`, the worst head.

    Args:
        program: The layer's plan.
        request: A call with a batch of one and a plain structure.
        rows: `[rows]` query rows.
    """
    device = request.query.device
    structure = request.structure
    kv_heads, kv_len = request.key.shape[1], request.key.shape[2]
    group = request.query.shape[1] // kv_heads
    visible = row_visible(structure, rows, device)
    sampled = replace(
        request,
        query=request.query[:, :, rows],
        structure=CallStructure(1, len(rows), kv_len, mask=visible),
        need_lse=True,
    )
    backend = EagerBackend()
    positions = rows.to(device) + structure.offset()
    found = torch.zeros(kv_heads, len(rows))
    for choice, heads in execute.launches(program):
        if choice.kind == "exact":
            continue
        part = heads_of(sampled, heads)
        if choice.kind == "window":
            kept = row_visible(windowed(structure, choice), rows, device)
        else:
            keep = keep_blocks(
                part.query[0].view(len(heads), group, len(rows), -1),
                pooled_keys(request.key[0, heads]),
                positions,
                kv_len,
                mass=choice.mass,
                sinks=choice.sinks,
                scaling=request.scaling,
                causal=structure.causal,
                softcap=request.softcap,
            )
            kept = visible & keys_of_blocks(keep, kv_len).repeat_interleave(group, dim=0)[None]
        full = backend.attend(part).lse
        less = backend.attend(replace(part, structure=replace_mask(part.structure, kept))).lse
        if full is None or less is None:
            raise RuntimeError(
                "the eager backend returned no log-sum-exp; expected one where need_lse is set"
            )
        ratio = torch.where(torch.isfinite(full), less - full, torch.zeros_like(full)).clamp(max=0.0)
        dropped = -torch.expm1(ratio)[0]
        found[heads] = dropped.view(len(heads), group, len(rows)).amax(1).float().cpu()
    inside = (positions < program.max_length).cpu()
    return found * inside


def replace_mask(structure: CallStructure, mask: Tensor) -> CallStructure:
    """Returns the structure with another dense mask."""
    return structure.with_changes(mask=mask)


@contextmanager
def monitoring(model: nn.Module, *, sample_rows: bool = True, factor: float = 3.0) -> Iterator[Monitor]:
    """Watches a planned model inside the `with` block, and keeps its counters for `statistics`.

    Args:
        model: A model that carries a plan.
        sample_rows: Compare sampled rows with exact attention and tighten; otherwise count only.
        factor: A unit is made exact when it drops more than this many times its calibrated 95th percentile.

    Raises:
        ValueError: If the model carries no plan.
    """
    plan = attach.plan_of(model)
    if plan is None:
        raise ValueError(
            "the model carries no plan, so there is nothing to watch; make one with `adaattn calibrate`"
        )
    monitor = Monitor(model, plan, sample_rows=sample_rows, factor=factor)
    model.__dict__["_adaattn_monitor"] = monitor
    with tapping(monitor.tap):
        yield monitor


def statistics(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the counters of each layer from the last `monitoring` block, activation rate included."""
    monitor: Monitor | None = model.__dict__.get("_adaattn_monitor")
    if monitor is None:
        return []
    return [
        {**asdict(counters), "activation": counters.activation}
        for _, counters in sorted(monitor.layers.items())
    ]
