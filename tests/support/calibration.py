"""Calibration of a model as tests have it: the model itself stands for its description."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from adaattn_hf.calibration import calibrate as calibration
from adaattn_hf.calibration import inputs
from adaattn_hf.calibration.inputs import Inputs, Run
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.settings import Calibration
from adaattn_hf.policy.prices import Price, PriceTable


def calibrate(model: Any, *given: Any, prices: PriceTable | None = None, **more: Any) -> Calibration:
    return calibration.decided(measure(open_inputs(model, *given, **more), prices))


def open_inputs(model: Any, *given: Any, **more: Any) -> Inputs:
    run = Run(**{one.name: more.pop(one.name) for one in fields(Run) if one.name in more})
    return inputs.open_inputs(model, *given, run=run, **more)


def save_plan(model: Any, result: Calibration, directory: Path) -> None:
    calibration.save_plan(model, result, directory)


def price_table(length: int, row: Mapping[str, float | Price], decode: bool = True) -> PriceTable:
    prices = {label: one if isinstance(one, Price) else Price(0.0, one) for label, one in row.items()}
    phases = ("prefill", "decode") if decode else ("prefill",)
    return PriceTable("a table", {}, {phase: {length: prices} for phase in phases})
