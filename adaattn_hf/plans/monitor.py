"""Monitors the calls of a plan: counts them, and compares sampled rows with exact attention.

The counters tell how often each layer ran and what share of (token, query head) pairs the plan changed. The monitor is
switched on by `config.adaattn["monitor"]`, or for a block by `adaattn_hf.monitoring`. It computes a few rows exactly:
one of 1,024 in prefill, one decode step of 256, and of padded and packed batches one sequence at a time. The loss of a
row is the attention mass of dropped keys (1 - exp(lse_kept - lse_all)) plus the relative change of its output by
rounded or projected operands; the ratio measured in calibration converts it to a predicted KL. A unit that loses more
than three times its 95th percentile in calibration is exact for the rest of the session, with one warning. In training
the monitor only warns, since a checkpointed backward pass must compute the same function again.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.call import AttentionCall
from ..attention.tracing import in_backward
from ..errors import logger
from .bound_layer import BoundLayer
from .choices import EXACT
from .plan import Plan
from .sampled import losses, one_run

ROW_SHARE = 1024
"""One row of so many is computed exactly in prefill: less than 0.1 % of the work of exact attention."""
STEP_SHARE = 256
"""One decode step of so many is computed exactly."""
PREFILL = 64
"""Smallest number of query rows of a prefill."""
LEAST_ROWS = 8
"""Rows to sample before a unit may be made exact."""
FACTOR = 3.0
"""A unit is made exact if it loses more than this many times its 95th percentile in calibration."""


@dataclass
class LayerStatistics:
    """Counters of one layer.

    Attributes:
        layer: Layer index.
        calls: Attention calls.
        pairs: (token, query head) pairs computed.
        changed: Pairs that the plan did not compute exactly.
        fewer_keys: Pairs that saw fewer keys than stock.
        rows: Rows that the monitor computed exactly, per key/value head.
        lost: Mean loss of these rows, per key/value head: mass dropped, and relative change by operands.
        predicted_kl: Predicted KL of the layer from these rows, nats/token.
        loud: Key/value heads that lose more than calibration allows.
        tightened: Those of them that the monitor has made exact.
        seconds: Time that monitoring took.
    """

    layer: int
    calls: int = 0
    pairs: int = 0
    changed: int = 0
    fewer_keys: int = 0
    rows: int = 0
    lost: list[float] = field(default_factory=list)
    predicted_kl: float = 0.0
    loud: list[int] = field(default_factory=list)
    tightened: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def activation(self) -> float:
        """Share of pairs that the plan did not compute exactly."""
        return self.changed / self.pairs if self.pairs else 0.0


class Monitor:
    """Counts and samples the calls of a plan, and makes heads exact that lose too much."""

    def __init__(self, plan: Plan, *, sample_rows: bool = True) -> None:
        self.layers: dict[int, LayerStatistics] = {}
        self._sample = sample_rows
        self._units = {(unit.layer, unit.head): unit for unit in plan.units}
        # by layer: sums of the losses of its rows and of their squares, per key/value head
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._warned = False

    def watch(
        self, index: int, bound_layer: BoundLayer | None, call: AttentionCall, training: bool = False
    ) -> BoundLayer | None:
        """Records one call of a layer; returns the layer to run, with heads made exact that lose too much.

        In `training` the call may be repeated for its gradients, so that nothing may be made exact.
        """
        start = time.perf_counter()
        q_len = call.query.shape[2]
        bound_layer = None if bound_layer is None else bound_layer.of_call(call.key.shape[1], q_len)
        counters = self.layers.get(index) or LayerStatistics(index)
        if in_backward():  # a checkpointed backward pass repeats a call
            return None if bound_layer is None else _tightened(counters, bound_layer)
        self.layers[index] = counters
        counters.calls += 1
        counters.pairs += call.query.shape[:3].numel()
        if bound_layer is None:
            return None
        bound_layer = _tightened(counters, bound_layer)
        _count(counters, bound_layer, call)
        if self._sample and (q_len >= PREFILL or counters.calls % STEP_SHARE == 0):
            part = one_run(call, counters.calls)
            if part is not None:
                self._look(counters, bound_layer, part, training or call.checked_kind().needs_grad)
                bound_layer = _tightened(counters, bound_layer)
        counters.seconds += time.perf_counter() - start
        return bound_layer

    def _look(self, counters: LayerStatistics, bound_layer: BoundLayer, call: AttentionCall, training: bool) -> None:
        q_len, index = call.query.shape[2], counters.layer
        count = max(1, q_len // ROW_SHARE)
        rows = torch.linspace(q_len // (2 * count), q_len - 1, count, dtype=torch.float32, device="cpu").long()
        lost = losses(bound_layer, call, rows)
        mass, square = self._sums.get(index, (0.0, 0.0))
        mass, square = self._sums[index] = mass + lost.sum(-1), square + lost.square().sum(-1)
        counters.rows += count
        counters.lost = (mass / counters.rows).tolist()
        numbered = enumerate(range(bound_layer.local_heads.start, bound_layer.local_heads.start + len(lost)))
        units = [(head, unit) for head, number in numbered if (unit := self._units.get((index, number))) is not None]
        squares = (square / counters.rows).tolist()
        counters.predicted_kl = sum(
            unit.risk * squares[head] / unit.dropped_square for head, unit in units if unit.dropped_square > 0
        )
        if counters.rows < LEAST_ROWS:
            return
        fresh = [
            head
            for head, unit in units
            # without a key less and without a loss in calibration there is no value to compare with
            if not (choice := bound_layer.plan.choices[head]).is_exact
            and (choice.keys is not None or unit.dropped_mass_p95 > 0)
            and counters.lost[head] > FACTOR * max(unit.dropped_mass_p95, 1e-4)
        ]
        counters.loud = sorted({*counters.tightened, *fresh})
        if fresh and not self._warned:
            self._warned, after = True, "it is exact from here on (and so is every other that does)"
            logger.warning(
                "adaattn: layer %d head %d loses %.3g of its attention here, above %g times what calibration saw; %s. "
                "Calibrate on text like this one.",
                index, fresh[0], counters.lost[fresh[0]], FACTOR,
                "training goes on with the plan as it is" if training else after,
            )  # fmt: skip
        if not training:
            counters.tightened = counters.loud


def _tightened(counters: LayerStatistics, bound_layer: BoundLayer) -> BoundLayer:
    if not counters.tightened:
        return bound_layer
    return bound_layer.with_choices(
        EXACT if head in counters.tightened else choice for head, choice in enumerate(bound_layer.plan.choices)
    )


def _count(counters: LayerStatistics, bound_layer: BoundLayer, call: AttentionCall) -> None:
    batch, heads, q_len, _ = call.query.shape
    group, structure = batch * heads // call.key.shape[1], call.structure
    positions = structure.query_positions
    first = max(structure.kv_len - q_len, 0) if positions is None else positions[0]
    changed, fewer_keys = bound_layer.changed_rows(first, first + q_len, structure.kv_len, structure.causal)
    counters.changed += group * changed
    counters.fewer_keys += group * fewer_keys
