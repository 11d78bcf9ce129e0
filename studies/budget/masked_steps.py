"""What the budget study of a masked-language model measures: plans and their proof, loss against speed, times."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adaattn_hf.errors import UsageError
from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.plans import store

from . import study
from .speed import attention_seconds, seconds

if TYPE_CHECKING:
    from adaattn_hf.calibration.measure import Measurement
    from adaattn_hf.calibration.settings import CalibrationSettings

CURVE = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1.5e-2, 2e-2, 3e-2, 5e-2)
"""Sums of risks, nats/token, of the plans that are set beside uniform choices; the last are beyond 1 %."""


def pages_file(path: Path, pages: Sequence[str]) -> Path:
    """Writes pages as the documents of a `.jsonl`; returns its path."""
    from adaattn_hf._files import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps({"text": page}) + "\n" for page in pages).encode())
    return path


@dataclass(frozen=True)
class Material:
    """A model and its texts.

    Attributes:
        loaded: Model, text encoder and scoring.
        data: Calibration text.
        held: Held-out text.
        lengths: Length bins.
    """

    loaded: Any
    data: list[Path]
    held: list[Path]
    lengths: tuple[int, ...]


def material(
    output: Path,
    model: str | None,
    data: list[Path] | None,
    verify_data: list[Path] | None,
    lengths: str | None,
    dtype: str,
    threads: int | None,
    maskings: int,
) -> Material:
    """Returns what a step works on: what was named, or what is in the package."""
    from adaattn_hf.calibration.inputs import most_positions
    from adaattn_hf.cli.loading import load

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load(model or str(demo_model_path("bert")), dtype=dtype, maskings=maskings)
    bins = tuple(study.numbers(lengths)) if lengths is not None else (most_positions(loaded.model),)
    if bins[0] is None:
        raise UsageError(
            "lengths: the model has no table of positions; give the length bins, such as 4096,8192"
        )
    return Material(
        loaded,
        data or [pages_file(output / "calibration_pages.jsonl", calibration_pages())],
        verify_data or [pages_file(output / "heldout_pages.jsonl", heldout_pages())],
        bins,  # type: ignore[arg-type]
    )


def budget_record(
    measurement: Measurement, words: dict[str, Any], settings: CalibrationSettings, plan_at: Path | None
) -> dict[str, Any]:
    """Returns what choosing and verifying under one budget found, as `study.seed_study` records it.

    Args:
        measurement: Risks and prices of the model.
        words: What the record belongs to.
        settings: Settings with the budget.
        plan_at: Directory that the plan is kept in, if it is.
    """
    from adaattn_hf.calibration.calibrate import choose_and_verify, save_plan
    from adaattn_hf.calibration.search import picks_of

    from .held_out import ratio

    start = time.perf_counter()
    result = choose_and_verify(measurement, settings)
    result.report.pop("prices")
    picks, model = picks_of(measurement, result.plan), measurement.inputs.model
    if plan_at is not None:
        plan_at.mkdir(parents=True, exist_ok=True)
        save_plan(model, result, plan_at)
        store.remove_plan(model)
    return {
        "settings": words,
        "budget": settings.budget,
        "seed": settings.seed,
        "met": result.met,
        "sentence": result.sentence,
        "picks": [measurement.layers.candidates.choices[pick].label for pick in picks],
        "report": result.report,
        "ratio": {str(n): ratio(measurement, picks, n) for n in settings.lengths},
        "prices": measurement.table.digest,
        "seconds": time.perf_counter() - start,
        "provenance": provenance(measurement.inputs.arms.device),
    }


def curve_record(measurement: Measurement) -> dict[str, Any]:
    """Returns loss and price ratio of plans of rising budgets, and of the same choice for every head.

    The plans are measured on all of the held-out text, so that it shows where their loss begins to rise.
    """
    import numpy as np

    from adaattn_hf.calibration.search import solve

    from .held_out import HeldOutPasses

    passes = HeldOutPasses(measurement)
    inputs, units = measurement.inputs, len(measurement.layers.units)
    lengths = inputs.settings.lengths
    everything = len(inputs.samples[lengths[-1]].held_out)

    def entry(name: str, picks: Any, count: int) -> dict[str, Any]:
        return {"plan": name, "sequences": count, **passes.evaluate(picks, count)}

    plans = [
        entry(f"per head, {budget:g}", solve(measurement, np.full(len(lengths), budget)).picks, everything)
        for budget in CURVE
    ]
    uniform = [
        entry(choice.label, np.full(units, place), inputs.settings.held_out)
        for place, choice in enumerate(measurement.layers.candidates.choices)
        if place
    ]
    return {"plans": plans, "uniform": uniform}


@torch.no_grad()
def speed_record(model: Any, plans: dict[str, Any], tokens: Tensor, rounds: int) -> dict[str, Any]:
    """Returns seconds of all attention calls and of the whole model, per arm, the smallest of interleaved rounds.

    Args:
        model: A masked-language model loaded with `attn_implementation="adaattn"`.
        plans: Plans whose tensors are in memory, by name.
        tokens: `[batch, n]`.
        rounds: Rounds over the arms.
    """
    programs: dict[str, dict[int, Any]] = {}
    modules = dict(store.attention_modules(model, model.config.model_type))
    for name, plan in plans.items():
        store.attach(model, plan, unverified=True)
        programs[name] = {index: store.program_of(module) for index, module in modules.items()}
        store.remove_plan(model)
    attention = attention_seconds(lambda: model(input_ids=tokens), programs, rounds, causal=False)
    whole = dict.fromkeys(attention, float("inf"))
    for _ in range(rounds):
        for name in whole:
            model.set_attn_implementation("sdpa" if name == "stock sdpa" else "adaattn")
            if name in plans:
                store.attach(model, plans[name], unverified=True)
            whole[name] = min(whole[name], seconds(lambda: model(input_ids=tokens), tokens.device))
            store.remove_plan(model)
    model.set_attn_implementation("adaattn")
    return {"batch": tokens.shape[0], "length": tokens.shape[1], "attention": attention, "model": whole}
