"""`adaattn calibrate`: a loss budget in, a verified plan out, stored and shown."""

import contextlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.calibration import calibrate as calibration
from adaattn_hf.calibration.inputs import OutOfTime, Run, open_inputs, refuse_longer
from adaattn_hf.calibration.layers import Measurement
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.passes import Benefit
from adaattn_hf.calibration.settings import Calibration, CalibrationSettings
from adaattn_hf.calibration.state import RISKS_FILE, forget, kept_in
from adaattn_hf.errors import ModelUnavailable, UsageError
from adaattn_hf.eval import team as processes
from adaattn_hf.eval.objectives import Objective
from adaattn_hf.eval.progress import beating, shown_progress, silent, tell
from adaattn_hf.eval.team import Team
from adaattn_hf.eval.texts import refuse_repeats
from adaattn_hf.patches.checkpoint import Checkpoint, load, placed, read_config, resolve_device
from adaattn_hf.patches.models.positions import longest_input, stated_positions
from adaattn_hf.patches.plans.attach import remove_plan
from adaattn_hf.patches.plans.bound import carried_by
from adaattn_hf.patches.plans.check import refuse_beyond_budget
from adaattn_hf.plans.limits import unproven
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import PLAN_FILE
from adaattn_hf.plans.wording import allowed

from .ending import ending, room_or_sentence, use_threads, writable
from .job import STAGES, Job, directories, directory, fit_to_text, job_of, kept, refuse_other_plan, scoring_of
from .options import Done, Options
from .pictures.headline import PLAN_HASH, REPORT_FILE, Speedups, digest, print_plan
from .pictures.page import plan_page

Show = Callable[[], None]
"""Shows the plan of a budget."""
FAILED_FILE = "adaattn_failed.json"
BUDGET_NOT_MET = 4
"""Exit code when the budget cannot be met and the plan is exact."""


def run(options: Options) -> Done:
    """Calibrates, and returns plan and report; code 4 if no plan passed for a budget."""
    console = Console(stderr=options.as_json)
    with ending(wrong=(ValueError,)):
        target, budgets = directory(options), directories(options)

    stays = partial(kept, target, "the same command with --resume")
    with ending(default=target, kept=stays, wrong=(ValueError, FileNotFoundError, ModelUnavailable)):
        use_threads(options.threads)
        resolve_device(options.device)
        job = job_of(options, target, budgets)
        refuse_repeats(job.data, job.verify_data)
        writable(target, "output_dir")
        if not options.resume and (file := kept_in(target)) is not None:
            raise UsageError(
                f"output_dir: {file} is an interrupted calibration; pass --resume to go on with it, delete it to begin "
                "anew, or give another --output-dir"
            )
        team = processes.join()
        if team.size > 1 and options.device == "auto":
            raise UsageError(
                f"device: got 'auto' in {team.size} processes, expected it in one, since it takes all GPUs; start one "
                "process, or leave --device out and each takes a GPU of its own"
            )
        config = read_config(job.model, **options.source())
        for budget in budgets.values():
            refuse_beyond_budget(budget, carried_by(config))
        positions, quiet = stated_positions(config), options.quiet or not team.is_main
        others = () if options.in_place else tuple(budgets)
        for other in others:  # what the configuration says, before weights and text are read
            refuse_other_plan(other, config)
        if options.lengths:
            refuse_longer(job.settings.lengths, positions, job.model)
        loading = partial("loading {}: {:.0f} s".format, job.model)
        full = partial(job.out_of_memory, "the machine", "")
        with beating(loading, console, quiet=quiet), room_or_sentence(full):
            loaded = load(job.model, dtype=options.dtype, device="cpu", implementation="adaattn", **options.source())
        scoring = scoring_of(loaded, options)
        for other in others:
            refuse_other_plan(other, config, loaded.model)
        if team.is_main:
            where = f"to {target}; {options.model or 'the packaged model'} is not changed"
            if options.in_place:
                where = f"into the model {target}: its config.json will carry it"
            rises = ", ".join(map(allowed, budgets.values()))
            tell(console, f"the plan will be written {where}", f"budget: perplexity {rises}")
        if not options.lengths:
            fitted, sentence = fit_to_text(job.settings, loaded.encode, job.data, job.verify_data, positions)
            job = replace(job, settings=fitted)
            if not quiet:
                tell(console, sentence)
        code, results = calibrated(job, loaded, scoring, console, team)
    processes.leave()
    return Done(results if team.is_main else None, code)


def calibrated(
    job: Job, loaded: Checkpoint, scoring: Objective, console: Console, team: Team
) -> tuple[int, dict[str, Any]]:
    """Calibrates a loaded checkpoint, stores and shows a plan for each budget.

    Returns the exit code, and plan and report as JSON (empty except on the leading process), of several budgets by
    directory. An earlier verified plan of these weights is the first candidate, and is kept if none passes now.
    """
    wanted = team.device(job.options.device)
    device, several = resolve_device(wanted), len(job.budgets) > 1
    about, under_way, worst, results, shown = "", "", 0, dict[str, Any](), list[Show]()
    quiet = job.options.quiet or not team.is_main
    say: Callable[..., None] = silent if quiet else partial(tell, console)

    def expect(seconds: Mapping[str, float]) -> None:
        say(*job.outlook(seconds))

    try:
        with shown_progress(console, quiet=quiet) as progress:

            def step(stage: str, done: int, total: int) -> None:
                nonlocal under_way
                under_way = stage
                progress(STAGES.get(stage, stage) + about, done, total)

            with room_or_sentence(lambda error: job.out_of_memory(device, under_way, error)):
                started = Run(job.target, job.options.resume, job.earlier, step, say, expect, job.began)
                inputs = open_inputs(
                    placed(loaded.model, wanted), loaded.encode, job.data, job.settings,
                    verify_data=job.verify_data, scoring=scoring, run=started,
                )  # fmt: skip
                measurement = measure(inputs, job.prices)
                state, proven = measurement.state, proven_in(job.target, "", "*/")
                # the smaller first: what it proves is a candidate of the larger
                for place, budget in sorted(job.budgets.items(), key=lambda one: one[1]):
                    if place.name in state.finished:
                        say(f"kept: {place}, which the interrupted run finished")
                        worst = max(worst, state.finished[place.name])
                        results[place.name] = stored(place) if team.is_main else {}
                        continue
                    about = f" for {place.name}" * several
                    result = calibration.decided(measurement, budget, proven)
                    proven += [result.plan] * result.met
                    one = replace(job, target=place)
                    code, results[place.name] = 0 if result.met else BUDGET_NOT_MET, {}
                    if team.is_main:
                        results[place.name], show = store(one, measurement, result, console)
                        shown.append(show)
                        if several:
                            state.finished[place.name] = code
                            state.save(job.target)
                    worst = max(worst, code)
    except OutOfTime as over:
        tell(console, f"{over}: {kept(job.target, '--resume with more --minutes')}")
        return BUDGET_NOT_MET, results
    finally:
        for show in shown:
            show()
    if team.is_main:
        forget(job.target)
    return worst, results if several else next(iter(results.values()))


def store(job: Job, measurement: Measurement, result: Calibration, console: Console) -> tuple[dict[str, Any], Show]:
    """Writes the plan of one budget with its report and risks; returns it as JSON, and a function that shows it."""
    plan = result.plan.to_json()
    prices = result.report.pop("prices")
    report = json_text({**result.report, PLAN_HASH: digest(plan.encode())}, indent=1, sort_keys=True)
    results = {"plan": json.loads(plan), "report": json.loads(report)}
    if not result.met and any(one.weight_hash == result.plan.weight_hash for one in proven_in(job.target, "")):
        failed = job.target / FAILED_FILE
        write_atomically(failed, json_text(results, indent=1, sort_keys=True) + "\n")
        kept = f"kept: the plan in {job.target}, which was verified before"
        return results, partial(tell, console, result.sentence, kept, f"report: {failed}")
    write_atomically(job.target / "adaattn_prices.json", prices)
    write_atomically(job.target / REPORT_FILE, report + "\n")
    speedups = Speedups.of(json.loads(report))
    picture = job.target / "adaattn_plan.html"
    write_atomically(picture, plan_page(result.plan, speedups))
    measurement.state.save(job.target, RISKS_FILE)
    model = measurement.inputs.arms.model
    calibration.save_plan(model, result, job.target)
    (job.target / FAILED_FILE).unlink(missing_ok=True)
    remove_plan(model)  # what follows is measured beside exact attention
    passes = [Benefit(**one) for one in result.report.get("whole_forward", [])]
    uses = [
        f"use: adaattn_hf.load_plan(model, {str(job.target)!r})",
        f"compare with stock attention: {evaluation(job, result.plan.dtype)}",
    ]
    lines = [
        *([result.report["cache"]] if result.met and "cache" in result.report else []),
        f"plan: {job.target}",
        *(uses if result.met else []),  # to run what is exact gains nothing
        f"picture: {picture}",
        f"other budgets: adaattn plan explore {shlex.quote(str(job.target))} --html FILE",
        *gains(passes, measurement.inputs.settings, longest_input(model)),
    ]

    def show() -> None:
        print_plan(console, result.plan, speedups, job.options.verbose, None if result.met else result.sentence)
        tell(console, *lines)

    return results, show


def gains(passes: Sequence[Benefit], settings: CalibrationSettings, positions: int | None) -> list[str]:
    """Returns a line on where a plan makes the whole model faster, as measured, and where it would gain more."""
    if not passes:
        return []
    longer = ["longer --lengths"] * (positions is None or settings.lengths[-1] < positions)
    steps = any(one.step for one in passes)
    more = [*longer, *["more rows (--batch-size)"] * (settings.aim == "step"), "a larger --budget"]
    more += ["in steps --aim step with more rows (--batch-size)"] * (steps and settings.aim != "step")
    untimed = "; captured steps were not timed" * settings.captured
    return [f"times as fast: {', '.join(one.words() for one in passes)}{untimed}; would gain more: {', '.join(more)}"]


def stored(place: Path) -> dict[str, Any]:
    """Returns what `store` wrote to a directory, as JSON."""
    failed = place / FAILED_FILE
    if failed.is_file():
        return dict(json.loads(failed.read_bytes()))
    files = {"plan": PLAN_FILE, "report": REPORT_FILE}
    return {name: json.loads((place / file).read_bytes()) for name, file in files.items()}


def proven_in(directory: Path, *folders: str) -> list[Plan]:
    """Returns the plans that held-out text has proven, of those in some folders of a directory (glob patterns)."""
    plans = []
    for path in sorted(file for folder in folders for file in directory.glob(f"{folder}{PLAN_FILE}")):
        with contextlib.suppress(PlanError):  # what cannot be read is replaced, or refused where it is another model's
            plans.append(Plan.from_pretrained(path))
    return [plan for plan in plans if plan.verified is not None and unproven(plan) is None]


def evaluation(job: Job, dtype: str) -> str:
    """Returns the shell command that evaluates the plan on the text that it was verified on."""
    words = ["adaattn", "eval", job.model, "--plan", str(job.target), *["--dtype", dtype] * (dtype != "float32")]
    for name, value in job.options.source().items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    words += ["--windows", "strided"] if job.options.gguf_file else []
    return shlex.join([*words, *(word for text in job.verify_data or job.data for word in ("--data", str(text)))])
