"""What the budget study of a masked-language model measures: plans and their proof, loss against speed, times."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaattn_hf import attach
from adaattn_hf.eval.budget import study
from adaattn_hf.eval.budget.speed import attention_seconds, seconds
from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages
from adaattn_hf.eval.errors import UsageError
from adaattn_hf.eval.provenance import provenance

CURVE = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Sums of risks, nats/token, of the plans that are set beside uniform choices."""


def pages_file(path: Path, pages: Sequence[str]) -> Path:
    """Writes pages as the documents of a `.jsonl`; returns its path."""
    from adaattn_hf.files import write_atomically

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
    from adaattn_hf.calibration.loading import load
    from adaattn_hf.calibration.measure import most_positions

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


def budget_record(run: Any, words: dict[str, Any], settings: Any, plan_at: Path | None) -> dict[str, Any]:
    """Returns what choosing and verifying under one budget found, as `study.seed_study` records it.

    Args:
        run: A calibration, measured and priced.
        words: What the record belongs to.
        settings: Settings with the budget.
        plan_at: Directory that the plan is kept in, if it is.
    """
    from adaattn_hf.calibration.calibrate import save_plan

    start = time.perf_counter()
    run.settings = replace(settings, windows=run.settings.windows)
    result = run.choose_and_verify()
    result.report.pop("prices")
    picks = run.picks(result.plan)
    if plan_at is not None:
        plan_at.mkdir(parents=True, exist_ok=True)
        save_plan(run.model, result, plan_at)
        attach.remove_plan(run.model)
    return {
        "settings": words,
        "budget": settings.budget,
        "seed": settings.seed,
        "met": result.met,
        "sentence": result.sentence,
        "picks": [run.candidates.choices[pick].label for pick in picks],
        "report": result.report,
        "ratio": {str(n): run.ratio(picks, n) for n in settings.lengths},
        "prices": run.table.digest,
        "seconds": time.perf_counter() - start,
        "provenance": provenance(run.arms.device),
    }


def curve_record(run: Any) -> dict[str, Any]:
    """Returns loss and price ratio of plans of rising budgets, and of the same choice for every head."""
    import numpy as np

    def entry(name: str, picks: Any) -> dict[str, Any]:
        return {"plan": name, **run.evaluate(picks)}

    units = np.arange(len(run.units))
    plans = [
        entry(f"per head, {budget:g}", run.solve(np.full(len(run.settings.lengths), budget)).picks)
        for budget in CURVE
    ]
    uniform = [
        entry(choice.label, np.full(len(units), place))
        for place, choice in enumerate(run.candidates.choices)
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
    modules = dict(attach.attention_modules(model, model.config.model_type))
    for name, plan in plans.items():
        attach.attach(model, plan)
        programs[name] = {index: attach.program_of(module) for index, module in modules.items()}
        attach.remove_plan(model)
    attention = attention_seconds(lambda: model(input_ids=tokens), programs, rounds, causal=False)
    whole = dict.fromkeys(attention, float("inf"))
    for _ in range(rounds):
        for name in whole:
            model.set_attn_implementation("sdpa" if name == "stock sdpa" else "adaattn")
            if name in plans:
                attach.attach(model, plans[name])
            whole[name] = min(whole[name], seconds(lambda: model(input_ids=tokens), tokens.device))
            attach.remove_plan(model)
    model.set_attn_implementation("adaattn")
    return {"batch": tokens.shape[0], "length": tokens.shape[1], "attention": attention, "model": whole}
