"""Calibration of a model as tests have it: the model itself stands for its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaattn_hf.calibration import assemble, inputs
from adaattn_hf.calibration import calibrate as calibration
from adaattn_hf.calibration.inputs import Inputs
from adaattn_hf.calibration.settings import Calibration
from adaattn_hf.patches.plans.subject import Subject


def calibrate(model: Any, *given: Any, **more: Any) -> Calibration:
    """`calibration.calibrate` of a model."""
    return calibration.calibrate(Subject(model), *given, **more)


def open_inputs(model: Any, *given: Any, **more: Any) -> Inputs:
    """`inputs.open_inputs` of a model."""
    return inputs.open_inputs(Subject(model), *given, **more)


def save_plan(model: Any, result: Calibration, directory: Path) -> None:
    """`assemble.save_plan` beside a model."""
    assemble.save_plan(Subject(model), result, directory)
