"""Runs one calibration from the command line, stores the plan, and shows the result."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.eval.objectives import NEXT_TOKEN, MaskedTokens, Objective
from adaattn_hf.eval.progress import duration, shown_progress, tell
from adaattn_hf.eval.settings import Masking
from adaattn_hf.eval.team import Team
from adaattn_hf.patches.checkpoint import Checkpoint, placed, resolve_device
from adaattn_hf.patches.plans.subject import Subject

from .._files import json_text, write_atomically
from ..calibration import calibrate as calibration
from ..calibration.assemble import save_plan
from ..calibration.inputs import OutOfTime, Run
from ..calibration.layers import Measurement
from ..calibration.measure import measured
from ..calibration.passes import Benefit
from ..calibration.settings import Calibration, CalibrationSettings
from ..calibration.state import RISKS_FILE, Known, forget, kept_in
from ..plans.limits import unproven
from ..plans.plan import Plan, PlanError
from ..plans.store import PLAN_FILE
from ..plans.wording import share
from ..policy.prices import PriceTable
from .memory import room_or_sentence
from .options import nats
from .pictures.grid import print_plan
from .pictures.headline import PLAN_HASH, REPORT_FILE, Bought, digest
from .pictures.page import plan_page

if TYPE_CHECKING:  # the command imports this module
    from .calibrate import Asked

Show = Callable[[], None]
"""Shows the plan of a budget."""
FAILED_FILE = "adaattn_failed.json"
MEASURED = "moments", "risk", "prices"
"""Stages that all budgets share."""
WORTHWHILE = 1.03
"""Whole models that are less faster than this hardly gain by their plan."""
BUDGET_NOT_MET = 4
"""Exit code when the budget cannot be met and the plan is exact."""


@dataclass(frozen=True)
class Job:
    """One calibration with everything that it needs.

    Attributes:
        target: Directory of the plan, or of the directories of several plans; holds measured risks during the run.
        settings: How the plan is made, with the first budget.
        budgets: Loss in nats/token of each plan, by directory.
        began: When the command began, by `time.monotonic`.
    """

    model: str
    data: tuple[Path, ...]
    verify_data: tuple[Path, ...] | None
    target: Path
    settings: CalibrationSettings
    prices: PriceTable | None
    asked: Asked
    budgets: Mapping[Path, float] = field(default_factory=dict)
    known: Known | None = None
    began: float = field(default_factory=time.monotonic)


def job_of(model: str | None, asked: Asked, settings: CalibrationSettings, target: Path, places: Sequence[Path]) -> Job:
    """Returns the job for the options; without a model the packaged one, without text its pages.

    `places` are the directories of the plans. Missing text or prices are a ValueError.
    """
    allowed = [nats(one) for one in asked.budget or ("1%" if model is None else "0.1%",)]
    if model is not None and not asked.data:
        raise ValueError("data is absent, expected text: --data FILE, a .txt or .jsonl or a directory of them")
    packaged, prices = not asked.data, asked.prices
    if prices is not None and not prices.is_file():
        raise ValueError(
            f"prices: {prices} is no file; expected the adaattn_prices.json that an earlier calibration wrote"
        )
    known = None if asked.risks is None else Known.read(asked.risks)
    if known is not None:
        settings = replace(settings, **known.settings)
    return Job(
        model or str(demo_model_path("llama")),
        asked.data or (pages_path("calibration"),),
        asked.verify_data or ((pages_path("heldout"),) if packaged else None),
        target,
        replace(settings, budget=allowed[0], lengths=asked.lengths or settings.lengths),
        None if prices is None else PriceTable.from_json(prices.read_text(encoding="utf-8")),
        asked,
        dict(zip(places, allowed, strict=True)),
        known,
    )


def scoring_of(loaded: Checkpoint, masking: Masking) -> Objective:
    """Returns how a checkpoint is scored: by next tokens, or as a masked LM that is read like `masking`."""
    if loaded.objective == "masked":
        return MaskedTokens.of(loaded.tokenizer, masking.mask_share, masking.maskings)
    return NEXT_TOKEN


def run(
    job: Job, loaded: Checkpoint, scoring: Objective, console: Console, team: Team, rank: int
) -> tuple[int, dict[str, Any]]:
    """Calibrates a loaded checkpoint, stores and shows a plan for each budget.

    Returns the exit code, and plan and report as JSON (empty except on the leading process), of several budgets by
    directory. An earlier verified plan of these weights is kept if none passes now.
    """
    wanted = job.asked.device
    if team.size > 1 and (wanted or "cuda") == "cuda" and resolve_device(None).type == "cuda":
        wanted = f"cuda:{rank}"
    device = resolve_device(wanted)
    several = len(job.budgets) > 1
    words = {place: f" for {place.name}" * several for place in job.budgets}
    about, worst, every, shown = "", 0, dict[str, Any](), list[Show]()

    quiet = job.asked.quiet or not team.leads

    def say(sentence: str, details: str = "") -> None:
        if not quiet:
            tell(console, f"{sentence} ({details})" if details and job.asked.verbose else sentence)

    try:
        with shown_progress({}, console, quiet=quiet) as progress:

            def expect(seconds: Mapping[str, float]) -> None:
                before = "moments" in seconds  # the measurements, which budgets share
                for line in outlook(job, seconds) if before else []:
                    say(line)
                for one in words.values() if before else [about]:
                    progress.expect({stage + one * (stage not in MEASURED): work for stage, work in seconds.items()})

            def step(stage: str, done: int, total: int) -> None:
                progress(f"{stage}{about}", done, total)

            def no_room(said: str) -> str:
                return out_of_memory(job, device, progress.stage.partition(" for ")[0], said)

            with room_or_sentence(no_room):
                measurement = measured(
                    Subject(placed(loaded.model, wanted)),
                    loaded.encode,
                    job.data,
                    job.settings,
                    verify_data=job.verify_data,
                    scoring=scoring,
                    prices=job.prices,
                    run=Run(job.target, job.asked.resume, job.known, step, say, expect, job.began),
                )
                state = measurement.state
                for place, budget in job.budgets.items():
                    if place.name in state.finished:
                        say(f"kept: {place}, which the interrupted run finished")
                        worst = max(worst, state.finished[place.name])
                        every[place.name] = _stored(place) if team.leads else {}
                        continue
                    about = words[place]
                    result = calibration.decided(measurement, budget)
                    one = replace(job, target=place)
                    code, every[place.name] = 0 if result.met else BUDGET_NOT_MET, {}
                    if team.leads:
                        every[place.name], show = store(one, measurement, result, console)
                        shown.append(show)
                        if several:
                            state.finished[place.name] = code
                            state.save(job.target)
                    worst = max(worst, code)
    except OutOfTime as over:
        tell(console, f"{over}: what is measured is kept in {job.target}; --resume with more --minutes goes on")
        return BUDGET_NOT_MET, every
    finally:
        for show in shown:
            show()
    if team.leads:
        forget(job.target)
    return worst, every if several else next(iter(every.values()))


def outlook(job: Job, stages: Mapping[str, float]) -> list[str]:
    """Returns lines on how long a calibration takes, what would make it shorter, and what an interrupt keeps."""
    s, stages = job.settings, {**stages, "plans": len(job.budgets) * stages["plans"]}
    total = sum(stages.values())
    parts = {"risk": "measuring risks", "prices": "timing choices", "plans": "finding and verifying plans"}
    told = ", ".join(f"{words} {duration(stages[stage])}" for stage, words in parts.items() if stages[stage])
    shorter = [f"--lengths {s.lengths[-1] // 2}"]
    if stages["risk"] > stages["plans"]:
        shorter += [f"--sequences {s.sequences // 2}"] * (s.sequences > 1)
    else:
        shorter += ["--bolder 0"] * (s.bolder > 0)
    lines = [f"time: about {duration(total)} in all ({told}); shorter with {', '.join(shorter)} or --minutes N"]
    if s.minutes is not None and total > 60.0 * s.minutes:
        lines.append(f"--minutes {s.minutes:g} will end it before that, perhaps without a plan")
    return [*lines, f"Ctrl-C keeps what is measured by then in {job.target}, and --resume goes on with it"]


def store(job: Job, measurement: Measurement, result: Calibration, console: Console) -> tuple[dict[str, Any], Show]:
    """Writes the plan of one budget with its report and risks; returns it as JSON, and a function that shows it."""
    plan = result.plan.to_json()
    prices = result.report.pop("prices")
    report = json_text({**result.report, PLAN_HASH: digest(plan.encode())}, indent=1, sort_keys=True)
    found = {"plan": json.loads(plan), "report": json.loads(report)}
    if not result.met and _proven(job.target, result.plan.weight_hash):
        failed = job.target / FAILED_FILE
        write_atomically(failed, json_text(found, indent=1, sort_keys=True) + "\n")
        return found, partial(
            _tell_all,
            console,
            [result.sentence, f"kept: the plan in {job.target}, which was verified before", f"report: {failed}"],
        )
    write_atomically(job.target / "adaattn_prices.json", prices)
    write_atomically(job.target / REPORT_FILE, report + "\n")
    buys = Bought.of(json.loads(report))
    picture = job.target / "adaattn_plan.html"
    write_atomically(picture, plan_page(result.plan, buys))
    measurement.state.save(job.target, RISKS_FILE)
    subject = measurement.inputs.subject
    save_plan(subject, result, job.target)
    (job.target / FAILED_FILE).unlink(missing_ok=True)
    subject.remove_plan()  # what follows is measured beside exact attention
    passes = [Benefit(**one) for one in result.report.get("whole_forward", [])]
    lines = [
        *([result.report["cache"]] if result.met and "cache" in result.report else []),
        *(one.sentence() for one in passes if job.asked.verbose or one.high < 1.0),
        *little(passes, result.met),
        f"plan: {job.target}",
        f"use: adaattn_hf.load_plan(model, {str(job.target)!r})",
        f"compare with stock attention: {evaluation(job, result.plan.dtype)}",
        f"picture: {picture}",
        f"other budgets: adaattn plan explore {shlex.quote(str(job.target))} --html FILE",
    ]

    def show() -> None:
        print_plan(console, result.plan, buys, job.asked.verbose, None if result.met else result.sentence)
        _tell_all(console, lines)

    return found, show


def little(passes: Sequence[Benefit], met: bool) -> list[str]:
    """Returns a line on what would gain more, where a plan hardly makes the whole model faster."""
    most = max(passes, key=lambda one: one.ratio, default=None)
    if not met or most is None or most.ratio >= WORTHWHILE:
        return []
    gain = f"{share(max(most.ratio - 1.0, 0.0))} at {most.length:,} tokens"
    return [f"this plan gains {gain}: longer --lengths gain more, and so does a larger --budget"]


def _stored(place: Path) -> dict[str, Any]:
    failed = place / FAILED_FILE
    if failed.is_file():
        return dict(json.loads(failed.read_bytes()))
    files = {"plan": PLAN_FILE, "report": REPORT_FILE}
    return {name: json.loads((place / file).read_bytes()) for name, file in files.items()}


def _tell_all(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        tell(console, line)


def out_of_memory(job: Job, device: object, stage: str, said: str) -> str:
    """Returns the out-of-memory message: what was being done, what would fit, and what is kept."""
    longest, batch = job.settings.lengths[-1], job.settings.batch
    doing = {
        "": f"loading the weights of {job.model}",
        "moments": f"reading the first sequence of {longest} tokens",
        "risk": f"measuring risks on sequences of {longest} tokens",
        "prices": f"timing attention of {batch} times {longest} tokens",
        "joint": f"measuring whole plans on {job.settings.joint} sequences of {longest} tokens",
    }.get(stage, f"verifying a plan on sequences of {longest} tokens")
    shorter = f"shorter lengths (--lengths {max(longest // 2, 32)})"
    fits = {
        "": "another --dtype (bfloat16 takes half of float32)",
        "risk": f"{shorter} or fewer rows (--rows {max(job.settings.rows // 2, 1)})",
        "prices": f"a smaller batch (--batch-size {batch // 2})" if batch > 1 else shorter,
        "joint": f"{shorter} or fewer sequences at once (--joint {max(job.settings.joint - 1, 1)})",
    }.get(stage, shorter)
    file = kept_in(job.target)
    kept = (
        "nothing was finished before it"
        if file is None
        else f"what was measured before is kept in {file}: the same command with --resume goes on, with another "
        "--batch-size or --held-out, too; delete that file to begin anew with other lengths, rows or sequences"
    )
    return (
        f"memory: {device} has none left while {doing} ({said}), expected room for it; what would fit: {fits}, or a "
        f"device with more memory; {kept}"
    )


def _proven(directory: Path, weights: str) -> bool:
    try:
        plan = Plan.from_pretrained(directory)
    except PlanError:
        return False
    return plan.weight_hash == weights and plan.verified is not None and unproven(plan) is None


def evaluation(job: Job, dtype: str) -> str:
    """Returns the shell command that evaluates the plan on the text that it was verified on."""
    words = ["adaattn", "eval", job.model, "--plan", str(job.target)]
    words += ["--dtype", dtype] if dtype != "float32" else []
    for name, value in job.asked.source().items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    words += ["--windows", "strided"] if job.asked.gguf_file else []
    for text in job.verify_data or job.data:
        words += ["--data", str(text)]
    return shlex.join(words)
