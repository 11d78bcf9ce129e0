"""Builds a plan from a solved allocation, with its records, tensors, report and files."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.patches.plans.configured import name_of_model

from .._files import write_atomically
from ..plans import store
from ..plans.evidence import MODEL, SOURCES
from ..plans.limits import Gates
from ..plans.plan import Plan, UnitRecord, Verified
from ..policy.knapsack import Allocation, Array, evaluate, shared_prices, worst_length
from .layers import Measurement, make_plan, steps_stay_exact
from .settings import Calibration


def finished_plan(
    measurement: Measurement, picks: NDArray[np.int64], verified: Verified | None, alpha: Array, gates: Gates
) -> Plan:
    """Returns the plan of an allocation with its proof, the protocol of its calibration, records and tensors.

    Sums of risks are re-scaled by `alpha` `[lengths]`.
    """
    plan = make_plan(measurement, picks)
    tensors = {
        f"layers.{layer.layer}.{name}": tensor.cpu().contiguous()
        for layer in plan.layers
        for head, choice in enumerate(layer.choices)
        for part in choice.parts
        for name, tensor in part.tensors(measurement.layers.tensors[layer.layer], head).items()
    }
    risk = worst_length(measurement.risks(alpha), picks)
    price, exact_price = (
        shared_prices(one, measurement.prices, measurement.launches) for one in (picks, np.zeros_like(picks))
    )
    dropped = np.asarray(sum(measurement.state.dropped.values()) / sum(measurement.state.done.values()))
    planned = {layer.layer for layer in plan.layers}
    units = tuple(
        UnitRecord(
            *unit, float(risk[at]), float(price[at]), float(exact_price[at]), *map(float, dropped[at, picks[at]])
        )
        for at, unit in enumerate(measurement.layers.units)
        if unit[0] in planned
    )
    # what the plan says elsewhere, and `rounds`, which changes nothing in it
    named = ("budget", "seed", "lengths", "rounds")
    protocol: dict[str, Any] = {
        MODEL: name_of_model(measurement.inputs.arms.model),
        "scoring": measurement.inputs.scoring.words(),
        "settings": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(measurement.inputs.settings).items()
            if name not in named
        },
        "alpha": alpha.tolist(),
        "gates": asdict(gates),
        "prices": measurement.table.digest,
        "machine": measurement.table.machine,
        SOURCES: measurement.inputs.sources,
        "clusters": "documents where they count for eight of one size, stretches of text otherwise",
    }
    s = measurement.inputs.settings
    prompts = s.aim == "prompt" and measurement.inputs.scoring.generates and picks.any()
    if prompts and steps_stay_exact(measurement.table, measurement.layers, s.lengths, picks):
        protocol["decode"] = "exact"
    return replace(plan, protocol=protocol, units=units, verified=verified, tensors=store.remember_tensors(tensors))


def report(
    measurement: Measurement,
    history: list[dict[str, Any]],
    allocation: Allocation | None,
    alpha: Array,
    verdicts: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the report of a calibration as JSON data: `allocation` is None for the exact plan.

    `history` is what each step predicted and measured, `verdicts` holds the last one of each length.
    """
    exact = np.zeros(len(measurement.layers.units), dtype=np.int64)
    base, price = (
        evaluate(picks, measurement.prices, measurement.risks(), measurement.launches).price
        for picks in (exact, exact if allocation is None else allocation.picks)
    )
    return {
        "prices": measurement.table.to_json(),
        "history": history,
        "alpha": alpha.tolist(),
        "verdicts": verdicts,
        "price_exact_seconds": base,
        "price_plan_seconds": price,
        "risk": allocation.risk.tolist() if allocation is not None else [],
        "table": measurement.solver(alpha).to_dict(),
    }


def save_plan(model: Any, result: Calibration, directory: Path) -> None:
    """Writes the plan beside a model's weights: to `config.json`, and its bases and means to a safetensors file.

    Every file is the old one or the new one, whatever happens.
    """
    load_plan(model, result.plan)
    data = result.plan.tensor_bytes()
    if data is not None:
        write_atomically(directory / store.TENSORS_FILE, data)
    # written in place, a full disk would leave half a configuration of the model
    with tempfile.TemporaryDirectory() as apart:
        model.config.save_pretrained(apart)
        for file in Path(apart).iterdir():
            data = file.read_bytes()
            if file.name == "config.json" and (directory / file.name).is_file():
                # the dtype is that of the checkpoint, in whatever dtype the model was calibrated
                old, names = json.loads((directory / file.name).read_bytes()), ("dtype", "torch_dtype")
                new = {name: value for name, value in json.loads(data).items() if name not in names}
                kept = {name: old[name] for name in names if name in old}
                data = (json.dumps({**new, **kept}, indent=2, sort_keys=True) + "\n").encode()
            write_atomically(directory / file.name, data)
    write_atomically(directory / store.PLAN_FILE, result.plan.to_json())
