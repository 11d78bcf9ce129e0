"""An allocation as a plan: its records, the tensors that it reads, what its making found, its files."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaattn_hf import attach
from adaattn_hf.approximate import LayerTensors
from adaattn_hf.calibration.measure import Measurements
from adaattn_hf.calibration.settings import Calibration
from adaattn_hf.files import write_atomically
from adaattn_hf.plan import PLAN_FORMAT, TENSORS_FILE, LayerPlan, Plan, UnitRecord, Verified
from adaattn_hf.policy.knapsack import Allocation, Array, evaluate, shared_prices


def make_plan(run: Measurements, picks: NDArray[np.int64], verified: Verified | None = None) -> Plan:
    """Returns the plan of an allocation, without a protocol and without tensors.

    Args:
        run: Risks and prices of a model.
        picks: `[units]`, place among the candidates of each unit's choice.
        verified: The proof, if there is one.
    """
    layers, units = [], []
    records = _records(run, picks)
    for place, index in enumerate(run.layers):
        mine = picks[place * run.kv_heads : (place + 1) * run.kv_heads]
        layer = LayerPlan(index, run.hashes[index], tuple(run.candidates.choices[pick] for pick in mine))
        if not layer.is_exact or run.own_numbers:
            layers.append(layer)
            units += records[place * run.kv_heads : (place + 1) * run.kv_heads]
    digest = hashlib.sha256("".join(run.hashes[index] for index in run.layers).encode()).hexdigest()
    return Plan(
        format=PLAN_FORMAT,
        model_type=run.model_type,
        weight_hash=digest,
        dtype=run.dtype,
        adaattn=importlib.metadata.version("adaattn-hf"),
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
        budget=run.settings.budget,
        seed=run.settings.seed,
        data_fingerprint=run.fingerprint,
        protocol={},
        lengths=run.settings.lengths,
        layers=tuple(layers),
        units=tuple(units),
        verified=verified,
        tensors="",
    )


def _records(run: Measurements, picks: NDArray[np.int64]) -> list[UnitRecord]:
    """Risk, prices and dropped mass of each unit."""
    risks = run.risks().max(axis=0)
    price, exact_price = (
        shared_prices(one, run.prices, run.launches) for one in (picks, np.zeros_like(picks))
    )
    dropped = np.asarray(sum(run.state.dropped.values()) / max(sum(run.state.done.values()), 1))
    return [
        UnitRecord(
            layer,
            head,
            float(risks[unit, picks[unit]]),
            float(price[unit]),
            float(exact_price[unit]),
            *(float(value) for value in dropped[unit, picks[unit]]),
        )
        for unit, (layer, head) in enumerate(run.units)
    ]


def finished_plan(
    run: Measurements, picks: NDArray[np.int64], verified: Verified | None, alpha: Array
) -> tuple[Plan, dict[str, Tensor]]:
    """Returns the plan of an allocation with the protocol of its making, and the tensors that it reads by name.

    Args:
        run: Risks and prices of a model.
        picks: `[units]`, place among the candidates of each unit's choice.
        verified: The proof, if there is one.
        alpha: `[lengths]`, factors that re-scaled the sums of risks.
    """
    plan = make_plan(run, picks, verified)
    tensors: dict[str, Tensor] = {}
    for layer in plan.layers:
        tensors.update(needed_tensors(layer, run.tensors[layer.layer]))
    named = ("budget", "seed", "lengths")
    settings = {name: value for name, value in asdict(run.settings).items() if name not in named}
    protocol: dict[str, Any] = {
        "scoring": run.scoring.words(),
        "settings": {
            name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
        },
        "alpha": [float(value) for value in alpha],
        "measured_directly": len(run.decided),
        "prices": run.table.digest if run.table is not None else "",
        "machine": run.table.machine if run.table is not None else "",
        "clusters": "documents where there are at least eight of them, stretches of text otherwise",
    }
    if run.own_numbers:
        protocol[attach.OWN_NUMBERS] = True
    return replace(plan, protocol=protocol, tensors=attach.remember_tensors(tensors)), tensors


def needed_tensors(layer: LayerPlan, tensors: LayerTensors) -> Mapping[str, Tensor]:
    """Returns the tensors that a layer's choices read, by their names in the file."""
    needed: dict[str, Tensor] = {}
    prefix = f"layers.{layer.layer}."
    if any(choice.precision == "int8" for choice in layer.choices) and tensors.key_mean is not None:
        needed[f"{prefix}key_mean"] = tensors.key_mean.cpu().contiguous()
    for head, choice in enumerate(layer.choices):
        if choice.rank:
            for name, bases in (("query_basis", tensors.query_basis), ("key_basis", tensors.key_basis)):
                needed[f"{prefix}{name}.{head}"] = bases[head][:, : choice.rank].cpu().contiguous()
    return needed


def report(
    run: Measurements,
    history: list[dict[str, Any]],
    found: Allocation | None,
    alpha: Array,
    verdicts: Sequence[Verified],
) -> dict[str, Any]:
    """Returns what the making of a plan found, as JSON data.

    Args:
        run: Risks and prices of a model.
        history: What each step predicted and measured.
        found: The allocation of the plan, `None` for the exact one.
        alpha: `[lengths]`, factors that re-scaled the sums of risks.
        verdicts: The last verdict of each length.
    """
    exact = np.zeros(len(run.units), dtype=np.int64)
    base = evaluate(exact, run.prices, run.risks(), run.launches).price
    return {
        "prices": run.table.to_json() if run.table is not None else "",
        "history": history,
        "alpha": alpha.tolist(),
        "direct": _direct(run),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "price_exact_seconds": base,
        "price_plan_seconds": found.price if found is not None else base,
        "risk": found.risk.tolist() if found is not None else [],
    }


def _direct(run: Measurements) -> list[dict[str, Any]]:
    """What pass two measured of each pair and length, beside the estimate and the risk that was reckoned with."""
    risks = run.risks()
    found = []
    for place, length in enumerate(run.settings.lengths if run.decided else ()):
        estimated = run.state.risks[length].mean()
        for (unit, choice), kl, error in zip(run.decided, *run.direct_kl(length), strict=True):
            layer, head = run.units[unit]
            found.append(
                {
                    "length": length,
                    "layer": layer,
                    "head": head,
                    "choice": run.candidates.choices[choice].label,
                    "estimated": float(estimated[unit, choice]),
                    "measured": float(kl),
                    "error": float(error),
                    "risk": float(risks[place, unit, choice]),
                }
            )
    return found


def save_plan(model: nn.Module, result: Calibration, directory: Path) -> None:
    """Writes the plan beside a model's weights: into `config.json`, and bases and means into their safetensors file."""
    attach.attach(model, result.plan)
    data = attach.tensor_bytes(result.plan)
    if data is not None:
        write_atomically(directory / TENSORS_FILE, data)
    model.config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    write_atomically(directory / "adaattn_plan.json", result.plan.to_json().encode())
