"""One calibration from the command line: run it on a device, store the plan, and show what came out."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.patches.checkpoint import resolve_device

from .. import load_preset
from .._files import json_text, write_atomically
from ..calibration import calibrate as calibration
from ..calibration.benefit import Benefit
from ..calibration.settings import CalibrationSettings
from ..calibration.team import Team
from ..plans.page import plan_page
from ..plans.render import heat_map, summary
from ..policy.prices import PriceTable
from .fit import fit_to_text
from .loading import Loaded, opened
from .options import nats
from .progress import display


@dataclass(frozen=True)
class Material:
    """A model, its text and the budget, named or packaged.

    Attributes:
        model: Hub id or directory.
        data: Calibration text.
        verify_data: Held-out text of another source.
        budget: Allowed loss, nats/token.
    """

    model: str
    data: tuple[Path, ...]
    verify_data: tuple[Path, ...] | None
    budget: float


def named_or_packaged(
    model: str | None,
    data: Sequence[Path] | None,
    verify_data: Sequence[Path] | None,
    budget: str | None,
    preset: str | None,
) -> Material:
    """Returns what was named; without a model the packaged one, and its pages where no text was named.

    Raises:
        ValueError: If text is missing, a preset has no budget, or both a preset and a budget are given.
    """
    if preset is not None and budget is not None:
        raise ValueError(f"preset is {preset!r} and budget {budget!r}, expected one of them")
    if preset is not None:
        relative = load_preset(preset).budget
        if not relative:
            raise ValueError(f"preset {preset!r} has no budget: it is exact as it is, and needs no plan")
        allowed = math.log1p(relative)
    else:
        allowed = nats(budget or ("1%" if model is None else "0.1%"))
    held = tuple(verify_data) if verify_data else None
    if data:
        return Material(model or str(demo_model_path("llama")), tuple(data), held, allowed)
    if model is not None:
        raise ValueError(
            "data is absent, expected text: --data FILE, a .txt or .jsonl or a directory of them"
        )
    return Material(
        str(demo_model_path("llama")), (pages_path("calibration"),), held or (pages_path("heldout"),), allowed
    )


def fitted(job: Job, console: Console | None) -> Job:
    """Returns the job with a length and folds that the model and the text can fill, told before the model loads."""
    tokenizer = opened(job.model, job.gguf_file)
    settings, sentence = fit_to_text(
        job.settings, tokenizer.encode, job.data, job.verify_data, tokenizer.positions
    )
    if console is not None:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    return replace(job, settings=settings)


BUDGET_NOT_MET = 4
"""Exit code when the budget cannot be met and the plan is exact."""


@dataclass(frozen=True)
class Job:
    """What one call of the command does.

    Attributes:
        model: Hub id or directory.
        gguf_file: GGUF file within it.
        target: Directory of the plan.
        data: Calibration text.
        verify_data: Held-out text of another source.
        settings: How the plan is made.
        prices: Prices measured before.
        device: Device by name, `None` for the default.
        resume: Go on with an interrupted run.
        quiet: Show no progress.
    """

    model: str
    gguf_file: str | None
    target: Path
    data: tuple[Path, ...]
    verify_data: tuple[Path, ...] | None
    settings: CalibrationSettings
    prices: PriceTable | None
    device: str | None
    resume: bool
    quiet: bool


def run(job: Job, loaded: Loaded, console: Console, team: Team, rank: int) -> int:
    """Calibrates a loaded checkpoint, stores and shows its plan; returns the exit code.

    Args:
        job: What is asked for.
        loaded: The checkpoint.
        console: Where the outcome goes.
        team: The processes that share the work.
        rank: This process's place on its machine, which names its device.
    """
    device = resolve_device(job.device)
    if device.type == "cuda" and device.index is None and team.size > 1:
        device = torch.device("cuda", rank)
    model, settings = loaded.model.to(device), job.settings

    def say(sentence: str) -> None:
        if team.leads and not job.quiet:
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    with display(settings, console, job.quiet or not team.leads) as progress:
        result = calibration.calibrate(
            model,
            loaded.encode,
            job.data,
            settings,
            verify_data=job.verify_data,
            scoring=loaded.scoring,
            prices=job.prices,
            directory=job.target,
            resume=job.resume,
            progress=progress,
            say=say,
        )
    code = 0 if result.met else BUDGET_NOT_MET
    if not team.leads:
        return code
    write_atomically(job.target / "adaattn_prices.json", result.report.pop("prices"))
    write_atomically(
        job.target / "adaattn_report.json", json_text(result.report, indent=1, sort_keys=True) + "\n"
    )
    calibration.save_plan(model, result, job.target)  # last: it ends what --resume goes on with
    console.print(heat_map(result.plan))
    lines = summary(result.plan)
    bought = [Benefit(**one).sentence() for one in result.report.get("whole_forward", [])]
    picture = job.target / "adaattn_plan.html"
    write_atomically(picture, plan_page(result.plan))
    for line in [
        *(lines if result.met else [*lines[:-1], result.sentence]),
        *([result.report["cache"]] if result.met and "cache" in result.report else []),
        *bought,
        f"plan: {job.target}",
        f"use: adaattn_hf.load_plan(model, {str(job.target)!r})",
        f"compare with stock attention: {evaluation(job, result.plan.dtype)}",
        f"picture: {picture}",
        f"other budgets: adaattn plan explore {job.target} --html FILE",
    ]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return code


def evaluation(job: Job, dtype: str) -> str:
    """The command that runs the plan of a calibration on the text that it was proved on, as one types it."""
    words = ["adaattn", "eval", job.model, "--plan", str(job.target)]
    words += ["--dtype", dtype] if dtype != "float32" else []
    words += ["--gguf-file", job.gguf_file, "--windows", "strided"] if job.gguf_file else []
    for text in job.verify_data or job.data:
        words += ["--data", str(text)]
    return shlex.join(words)


def print_calibration(directory: Path) -> None:
    """Prints the plan of a directory and what its making found as JSON."""
    files = {"plan": "adaattn_plan.json", "report": "adaattn_report.json"}
    found = {name: json.loads((directory / file).read_text(encoding="utf-8")) for name, file in files.items()}
    print(json.dumps(found, indent=1))
