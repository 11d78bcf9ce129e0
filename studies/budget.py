"""What the plans of a measurement lose on held-out text, which proves nothing, and what they save.

By the price table, by the device's own time of attention calls, and by the pairs of queries and keys that a plan of
windows reads: what attention can gain by it, whatever the kernel.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import ALL
from adaattn_hf.attention.listeners import tapping
from adaattn_hf.calibration.layers import Measurement, Picks, unit_prices
from adaattn_hf.calibration.proof import Evidence
from adaattn_hf.eval.arms import exact_tap
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.execute import attend
from adaattn_hf.policy.knapsack import shared_prices
from adaattn_hf.stats.stopwatch import on_device, quartiles

_WINDOW = re.compile(r"w(\d+)\+(\d+)")
_ALL = ("exact", "bf16", "int8")
"""Labels of parts that change no pair."""


def scores(evidence: Evidence) -> dict[str, float]:
    """Returns means per token and the one-sided bound at 95 % of the loss, in nats/token."""
    worst, top1 = evidence.worst(0.95), evidence.agree / sum(evidence.tokens)
    return {"delta_nll": worst.mean, "upper": worst.upper(0.95), "kl": float(evidence.kl.mean()), "top1": top1}


def ratio(measurement: Measurement, picks: Picks, length: int) -> float:
    """Returns how many times as fast as exact attention the prefill of an allocation is, by the price table."""
    prices, launches = unit_prices(measurement.table, measurement.layers, [length], "prefill")
    none = np.zeros_like(picks)
    exact, own = (float(shared_prices(one, prices, launches).sum()) for one in (none, picks))
    return exact / own


def fewer_pairs(picks: Sequence[str], length: int) -> float | None:
    """Returns how many times fewer pairs than causal attention a plan reads; None where that depends on the data.

    Args:
        picks: Label of each unit's choice.
        length: Tokens of the prefill.
    """
    every, read = length * (length + 1) // 2, 0
    for label in picks:
        found = window_of(label)
        if found is None:
            return None
        window, sinks = found
        hidden = max(length - window, 0)  # keys before the last row's window
        sinks = min(sinks, hidden)
        read += every - hidden * (hidden + 1) // 2 + sinks * hidden - sinks * (sinks - 1) // 2
    return every * len(picks) / read


def window_of(label: str) -> tuple[int, int] | None:
    """Window and sinks of a choice, `ALL` and none where it is exact; None where what it reads depends on the data."""
    window, sinks = ALL, 0
    for part in set(label.split()).difference(_ALL):
        found = _WINDOW.fullmatch(part)
        if found is None:
            return None
        window, sinks = map(int, found.groups())
    return window, sinks


@torch.no_grad()
def attention_seconds(
    forward: Callable[[], object], arms: Mapping[str, Mapping[int, BoundLayer | None]]
) -> dict[str, float]:
    """Returns seconds of all attention calls of one forward pass: stock sdpa's, the exact ones, each arm's.

    Args:
        forward: The pass, which goes on with exact attention.
        arms: Programs by layer, by name; a layer without one is exact.
    """
    stock = AttentionInterface()["sdpa"]
    total = dict.fromkeys(("stock sdpa", "exact", *arms), 0.0)

    def tap(module: nn.Module, call: AttentionCall) -> Tensor:
        index = int(module.layer_idx)  # type: ignore[arg-type]
        tensors = (call.query, call.key, call.value)
        calls: dict[str, Callable[[], object]] = {
            "stock sdpa": partial(stock, module, *tensors, None, scaling=call.scaling, is_causal=True),
            "exact": partial(exact_tap, module, call),
        }
        for name, bound_layers in arms.items():
            bound_layer = bound_layers.get(index)
            calls[name] = calls["exact"] if bound_layer is None else partial(attend, bound_layer, call)
        for name, runs in on_device(calls, host=False).items():
            total[name] += quartiles(runs)[1]
        return exact_tap(module, call)

    with tapping(tap):
        forward()
    return total
