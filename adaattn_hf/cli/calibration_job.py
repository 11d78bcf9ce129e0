"""One calibration from the command line: run it on a device, store the plan, and show what came out."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.eval.progress import shown_progress, tell
from adaattn_hf.patches.checkpoint import resolve_device
from adaattn_hf.patches.plans.subject import Subject

from .. import load_preset
from .._files import json_text, write_atomically
from ..calibration import calibrate as calibration
from ..calibration.benefit import Benefit
from ..calibration.settings import CalibrationSettings
from ..calibration.state import FILE, CalibrationState
from ..calibration.team import Team
from ..plans.plan import Plan, PlanError
from ..policy.prices import PriceTable
from .fit import fit_to_text
from .loading import Encode, Loaded
from .memory import room_or_sentence
from .options import known_prices, nats
from .pictures.grid import print_plan
from .pictures.headline import PLAN_HASH, REPORT_FILE, Bought, digest
from .pictures.page import plan_page

if TYPE_CHECKING:  # the command imports this module
    from .calibrate import Asked

BUDGET_NOT_MET = 4
"""Exit code when the budget cannot be met and the plan is exact."""


@dataclass(frozen=True)
class Job:
    """What one call of the command does.

    Attributes:
        model: Hub id or directory.
        data: Calibration text.
        verify_data: Held-out text of another source.
        target: Directory of the plan.
        settings: How the plan is made.
        prices: Prices measured before.
        asked: What was asked for.
    """

    model: str
    data: tuple[Path, ...]
    verify_data: tuple[Path, ...] | None
    target: Path
    settings: CalibrationSettings
    prices: PriceTable | None
    asked: Asked


def job_of(model: str | None, asked: Asked, settings: CalibrationSettings, target: Path) -> Job:
    """Returns what was asked for; without a model the packaged one, and its pages where no text was named.

    Raises:
        ValueError: If text or prices are missing, a preset has no budget, or both a preset and a budget are given.
    """
    preset, budget = asked.preset, asked.budget
    if preset is not None and budget is not None:
        raise ValueError(f"preset is {preset!r} and budget {budget!r}, expected one of them")
    if preset is not None:
        relative = load_preset(preset).budget
        if not relative:
            raise ValueError(f"preset {preset!r} has no budget: it is exact as it is, and needs no plan")
        allowed = math.log1p(relative)
    else:
        allowed = nats(("1%" if model is None else "0.1%") if budget is None else budget)
    if model is not None and not asked.data:
        raise ValueError("data is absent, expected text: --data FILE, a .txt or .jsonl or a directory of them")
    packaged = not asked.data
    return Job(
        model or str(demo_model_path("llama")),
        asked.data or (pages_path("calibration"),),
        asked.verify_data or ((pages_path("heldout"),) if packaged else None),
        target,
        replace(settings, budget=allowed, lengths=asked.lengths or settings.lengths),
        known_prices(asked.prices),
        asked,
    )


def fitted(job: Job, encode: Encode, positions: int | None, console: Console | None) -> Job:
    """Returns the job with a length and folds that the model and the text can fill, told before the model loads."""
    settings, sentence = fit_to_text(job.settings, encode, job.data, job.verify_data, positions)
    if console is not None:
        tell(console, sentence)
    return replace(job, settings=settings)


def work_of(settings: CalibrationSettings) -> dict[str, float]:
    """The work of each stage in tokens through the model, a backward pass as two; a plan that fails makes it longer."""
    s, tokens = settings, float(sum(settings.lengths))
    return {
        "moments": tokens,
        "risk": tokens * s.sequences * (4 + 2 * s.labels),
        "prices": 4 * tokens,
        "joint": 4 * tokens * s.joint,
        **{f"verify {length}": 2.0 * length * (s.held_out + s.haystacks) for length in s.lengths},
    }


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
    device = resolve_device(job.asked.device)
    if device.type == "cuda" and device.index is None and team.size > 1:
        device = resolve_device(f"cuda:{rank}")
    settings = job.settings

    def say(sentence: str) -> None:
        if team.leads and not job.asked.quiet:
            tell(console, sentence)

    quiet = job.asked.quiet or not team.leads
    with shown_progress(work_of(settings), console, quiet=quiet) as progress:

        def no_room(said: str) -> str:
            return out_of_memory(job, device, progress.stage, said)

        with room_or_sentence(no_room):
            subject = Subject(loaded.model.to(device))
            result = calibration.calibrate(
                subject,
                loaded.encode,
                job.data,
                settings,
                verify_data=job.verify_data,
                scoring=loaded.scoring,
                prices=job.prices,
                directory=job.target,
                resume=job.asked.resume,
                progress=progress,
                say=say,
            )
    code = 0 if result.met else BUDGET_NOT_MET
    if not team.leads:
        return Outcome(code, {})
    plan = result.plan.to_json()
    prices = result.report.pop("prices")
    report = json_text({**result.report, PLAN_HASH: digest(plan.encode())}, indent=1, sort_keys=True)
    found = {"plan": json.loads(plan), "report": json.loads(report)}
    if not result.met and _proven(job.target, result.plan.weight_hash):
        failed = job.target / "adaattn_failed.json"
        write_atomically(failed, json_text(found, indent=1, sort_keys=True) + "\n")
        CalibrationState.forget(job.target)
        for line in (
            result.sentence,
            f"kept: the plan in {job.target}, which was proven before",
            f"report: {failed}",
        ):
            tell(console, line)
        return Outcome(code, found)
    write_atomically(job.target / "adaattn_prices.json", prices)
    write_atomically(job.target / REPORT_FILE, report + "\n")
    buys = Bought.of(json.loads(report))
    picture = job.target / "adaattn_plan.html"
    write_atomically(picture, plan_page(result.plan, buys))
    calibration.save_plan(subject, result, job.target)  # last: it ends what --resume goes on with
    print_plan(console, result.plan, buys, job.asked.verbose, None if result.met else result.sentence)
    for line in [
        *([result.report["cache"]] if result.met and "cache" in result.report else []),
        *_of_passes(result.report.get("whole_forward", []), job.asked.verbose),
        f"plan: {job.target}",
        f"use: adaattn_hf.load_plan(model, {str(job.target)!r})",
        f"compare with stock attention: {evaluation(job, result.plan.dtype)}",
        f"picture: {picture}",
        f"other budgets: adaattn plan explore {shlex.quote(str(job.target))} --html FILE",
    ]:
        tell(console, line)
    return Outcome(code, found)


def _of_passes(measured: Sequence[Mapping[str, Any]], verbose: bool) -> list[str]:
    """Sentences on whole passes: all where they are asked for, and those that are slower in any case."""
    every = [Benefit(**one) for one in measured]
    return [one.sentence() for one in every if verbose or one.high < 1.0]


def out_of_memory(job: Job, device: object, stage: str, said: str) -> str:
    """What to say where a calibration has no room: what was being done, what would fit, and what is kept."""
    longest, batch = job.settings.lengths[-1], job.settings.batch
    doing = {
        "": f"loading the weights of {job.model}",
        "moments": f"reading the first sequence of {longest} tokens",
        "risk": f"measuring risks on sequences of {longest} tokens",
        "prices": f"timing attention of {batch} times {longest} tokens",
        "joint": f"measuring whole plans on {job.settings.joint} sequences of {longest} tokens",
    }.get(stage, f"proving a plan on sequences of {longest} tokens")
    shorter = f"shorter lengths (--lengths {max(longest // 2, 32)})"
    fits = {
        "": "another --dtype (bfloat16 takes half of float32)",
        "risk": f"{shorter} or fewer rows (--rows {max(job.settings.rows // 2, 1)})",
        "prices": f"a smaller batch (--batch-size {batch // 2})" if batch > 1 else shorter,
        "joint": f"{shorter} or fewer sequences at once (--joint {max(job.settings.joint - 1, 1)})",
    }.get(stage, shorter)
    file = job.target / FILE
    kept = (
        f"the risks that are measured are kept in {file}: the same command with --resume goes on, with another "
        "--batch-size or --held-out, too; delete that file to begin anew with other lengths, rows or sequences"
        if file.is_file()
        else "nothing was finished before it"
    )
    return (
        f"memory: {device} has none left while {doing} ({said}), expected room for it; what would fit: {fits}, or a "
        f"device with more memory; {kept}"
    )


def _proven(directory: Path, weights: str) -> bool:
    """Whether a directory holds a plan of these weights that passed on held-out text."""
    try:
        plan = Plan.from_pretrained(directory)
    except PlanError:
        return False
    return plan.weight_hash == weights and plan.verified is not None and plan.verified.passed


def evaluation(job: Job, dtype: str) -> str:
    """The command that runs the plan of a calibration on the text that it was proved on, as one types it."""
    words = ["adaattn", "eval", job.model, "--plan", str(job.target)]
    words += ["--dtype", dtype] if dtype != "float32" else []
    for name, value in job.asked.source().items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    words += ["--windows", "strided"] if job.asked.gguf_file else []
    for text in job.verify_data or job.data:
        words += ["--data", str(text)]
    return shlex.join(words)
