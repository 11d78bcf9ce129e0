"""A plan for other attention: its windows as plain JSON, where that form computes the same function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, unknown
from .choices import Window
from .plan import Plan
from .record import PlanError

NO_SINKS = (
    "it keeps no first tokens beside a window, and a plan's windows without them lose far more than a budget "
    "(docs/results/without_sinks.md)"
)
REFUSED: Mapping[str, str] = {
    "vllm": NO_SINKS,
    "sglang": NO_SINKS,
    "llama.cpp": NO_SINKS,
    "tei": "it computes attention of its own, which takes no windows from outside",
    "duoattention": "its heads are full or share one window: other windows than the plan's, never verified",
    "kv-bits": "its caches quantise by schemes of their own, over which no plan was verified",
}
"""Forms that are asked for, and why they are not written."""


def exported(plan: Plan, form: str) -> dict[str, Any]:
    """Returns a plan in another form, as JSON data: `flex`, windows and first keys for `flex_attention`'s masks.

    Raises:
        UsageError: There is no such form, or none that keeps the budget.
        PlanError: The plan holds more than the form can say.
    """
    if form in REFUSED:
        raise UsageError(f"to: got {form}, expected flex: {REFUSED[form]}; run the plan under Transformers")
    if form != "flex":
        raise UsageError(unknown("to", form, ["flex", *REFUSED]))
    if "mask_share" in plan.protocol.get("scoring", {}) or plan.configuration.get("sliding_window") is not None:
        raise PlanError("plan: its model looks both ways or has windows of its own, expected a causal model without")
    layers = {}
    for layer in plan.layers:
        other = [choice.label for choice in layer.choices if choice.operands]
        if other:
            raise PlanError(
                f"plan: layer {layer.layer} has {other[0]!r}, expected windows alone, since flex rounds nothing; "
                "calibrate with --families window"
            )
        keys = [choice.keys for choice in layer.choices]
        layers[str(layer.layer)] = {
            "windows": [one.window if isinstance(one, Window) else None for one in keys],
            "sinks": [one.sinks if isinstance(one, Window) else 0 for one in keys],
        }
    return {
        "form": "flex",
        "weights": plan.weight_hash,
        "dtype": plan.dtype,
        "budget": plan.budget,
        "verified": None if plan.verified is None else plan.verified.sentence,
        "max_length": plan.max_length,
        "decode": "exact" if plan.exact_steps else "planned",
        "layers": layers,
    }
