"""One calibration from the command line: run it on a device, store the plan, and show what came out."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.patches.checkpoint import resolve_device

from .. import load_preset
from .._files import json_text, write_atomically
from ..calibration import calibrate as calibration
from ..calibration.benefit import Benefit
from ..calibration.settings import CalibrationSettings
from ..calibration.state import CalibrationState
from ..calibration.team import Team
from ..plans.page import plan_page
from ..plans.plan import PlanError
from ..plans.reading import read_plan
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
        allowed = nats(("1%" if model is None else "0.1%") if budget is None else budget)
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


class Outcome(NamedTuple):
    """What a calibration came to: an exit code, and plan and report as JSON, empty but where a process leads a team."""

    code: int
    found: dict[str, Any]


def run(job: Job, loaded: Loaded, console: Console, team: Team, rank: int) -> Outcome:
    """Calibrates a loaded checkpoint, stores and shows its plan.

    A plan of these weights that was proven before stays where no plan could be proven now.

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
        return Outcome(code, {})
    prices, report = result.report.pop("prices"), json_text(result.report, indent=1, sort_keys=True)
    found = {"plan": json.loads(result.plan.to_json()), "report": json.loads(report)}
    if not result.met and _proven(job.target, result.plan.weight_hash):
        failed = job.target / "adaattn_failed.json"
        write_atomically(failed, json_text(found, indent=1, sort_keys=True) + "\n")
        CalibrationState.forget(job.target)
        for line in (
            result.sentence,
            f"kept: the plan in {job.target}, which was proven before",
            f"report: {failed}",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return Outcome(code, found)
    write_atomically(job.target / "adaattn_prices.json", prices)
    write_atomically(job.target / "adaattn_report.json", report + "\n")
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
    return Outcome(code, found)


def _proven(directory: Path, weights: str) -> bool:
    """Whether a directory holds a plan of these weights that passed on held-out text."""
    try:
        plan = read_plan(directory)
    except PlanError:
        return False
    return plan.weight_hash == weights and plan.verified is not None and plan.verified.passed


def refuse_other_model(target: Path, model: str) -> None:
    """Refuses a directory whose `config.json` a calibration did not write and would overwrite.

    Raises:
        ValueError: It holds a checkpoint, or a configuration, and is not the model's own directory.
    """
    if Path(model).is_dir() and target.resolve() == Path(model).resolve():
        return
    weights = [
        file.name
        for kind in ("*.safetensors", "*.bin", "*.gguf")
        for file in sorted(target.glob(kind))
        if not file.name.startswith("adaattn_")
    ]
    ours = (target / "adaattn_plan.json").is_file()
    if weights or ((target / "config.json").is_file() and not ours):
        raise ValueError(
            f"out: {target} holds {weights[0] if weights else 'config.json'}, of a model that is not {model}, and its "
            "config.json would be overwritten; give the model's own directory, or one for the plan alone"
        )


def evaluation(job: Job, dtype: str) -> str:
    """The command that runs the plan of a calibration on the text that it was proved on, as one types it."""
    words = ["adaattn", "eval", job.model, "--plan", str(job.target)]
    words += ["--dtype", dtype] if dtype != "float32" else []
    words += ["--gguf-file", job.gguf_file, "--windows", "strided"] if job.gguf_file else []
    for text in job.verify_data or job.data:
        words += ["--data", str(text)]
    return shlex.join(words)


def print_calibration(found: dict[str, Any]) -> None:
    """Prints a plan and what its making found as JSON."""
    print(json.dumps(found, indent=1))
