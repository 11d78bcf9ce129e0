"""`adaattn calibrate`: a loss budget in, a verified plan out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from adaattn_hf.calibration import calibrate as calibration
from adaattn_hf.calibration.inputs import OutOfTime, Run, open_inputs, refuse_longer
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.state import forget, kept_in
from adaattn_hf.errors import ModelUnavailable, UsageError
from adaattn_hf.eval import team as processes
from adaattn_hf.eval.objectives import Objective
from adaattn_hf.eval.progress import beating, shown_progress, tell
from adaattn_hf.eval.team import Team
from adaattn_hf.eval.texts import refuse_repeats
from adaattn_hf.patches.checkpoint import Checkpoint, encoded, load, placed, read_config, read_tokenizer, resolve_device
from adaattn_hf.patches.models.positions import stated_positions
from adaattn_hf.patches.plans.bound import carried_by
from adaattn_hf.patches.plans.check import refuse_beyond_budget
from adaattn_hf.plans.wording import allowed

from .ending import ending, room_or_sentence, use_threads, writable
from .job import STAGES, Job, directories, directory, fit_to_text, job_of, kept, refuse_other_plan, scoring_of
from .options import Done, Options
from .storing import BUDGET_NOT_MET, Show, proven_in, store, stored


def run(options: Options) -> Done:
    """Calibrates, and returns plan and report; code 4 if no plan passed for a budget."""
    console = Console(stderr=options.as_json)
    with ending(wrong=(ValueError,)):
        target, places = directory(options), directories(options)

    stays = partial(kept, target, "the same command with --resume")
    with ending(default=target, stays=stays, kept=stays, wrong=(ValueError, FileNotFoundError, ModelUnavailable)):
        use_threads(options.threads)
        resolve_device(options.device)
        job = job_of(options, target, places)
        refuse_repeats(job.data, job.verify_data)
        writable(target, "output_dir")
        if not options.resume and (file := kept_in(target)) is not None:
            raise UsageError(
                f"output_dir: {file} is an interrupted calibration; pass --resume to go on with it, delete it to begin "
                "anew, or give another --output-dir"
            )
        team, rank = processes.join()
        if team.size > 1 and options.device == "auto":
            raise UsageError(
                f"device: got 'auto' in {team.size} processes, expected it in one, since it takes all GPUs; start one "
                "process, or leave --device out and each takes a GPU of its own"
            )
        config = read_config(job.model, **options.source())
        encode = partial(encoded, read_tokenizer(job.model, **options.source()))
        for budget in job.budgets.values():
            refuse_beyond_budget(budget, carried_by(config))
        positions, silent = stated_positions(config), options.quiet or not team.leads
        others = () if options.in_place else places
        for other in others:  # what the configuration says, before weights and text are read
            refuse_other_plan(other, config)
        if options.lengths:
            refuse_longer(job.settings.lengths, positions, job.model)
        loading = partial("loading {}: {:.0f} s".format, job.model)
        full = partial(job.out_of_memory, "the machine", "")
        with beating(loading, console, quiet=silent), room_or_sentence(full):
            loaded = load(job.model, dtype=options.dtype, device="cpu", implementation="adaattn", **options.source())
        scoring = scoring_of(loaded, options)
        for other in others:
            refuse_other_plan(other, config, loaded.model)
        if team.leads:
            where = f"to {target}; {options.model or 'the packaged model'} is not changed"
            if options.in_place:
                where = f"into the model {target}: its config.json will carry it"
            tell(console, f"the plan will be written {where}")
            tell(console, f"budget: perplexity {', '.join(map(allowed, job.budgets.values()))}")
        if not options.lengths:
            fitted, sentence = fit_to_text(job.settings, encode, job.data, job.verify_data, positions)
            job = replace(job, settings=fitted)
            if not silent:
                tell(console, sentence)
        code, results = calibrated(job, loaded, scoring, console, team, rank)
    processes.leave()
    return Done(results if team.leads else None, code)


def calibrated(
    job: Job, loaded: Checkpoint, scoring: Objective, console: Console, team: Team, rank: int
) -> tuple[int, dict[str, Any]]:
    """Calibrates a loaded checkpoint, stores and shows a plan for each budget.

    Returns the exit code, and plan and report as JSON (empty except on the leading process), of several budgets by
    directory. An earlier verified plan of these weights is the first candidate, and is kept if none passes now.
    """
    wanted = processes.device_of(team, rank, job.options.device)
    device, several = resolve_device(wanted), len(job.budgets) > 1
    about, under_way, worst, results, shown = "", "", 0, dict[str, Any](), list[Show]()
    quiet = job.options.quiet or not team.leads

    def say(sentence: str) -> None:
        if not quiet:
            tell(console, sentence)

    try:
        with shown_progress(console, quiet=quiet) as progress:

            def expect(seconds: Mapping[str, float]) -> None:
                for line in job.outlook(seconds):
                    say(line)

            def step(stage: str, done: int, total: int) -> None:
                nonlocal under_way
                under_way = stage
                progress(STAGES.get(stage, stage) + about, done, total)

            with room_or_sentence(lambda error: job.out_of_memory(device, under_way, error)):
                inputs = open_inputs(
                    placed(loaded.model, wanted),
                    loaded.encode,
                    job.data,
                    job.settings,
                    verify_data=job.verify_data,
                    scoring=scoring,
                    run=Run(job.target, job.options.resume, job.known, step, say, expect, job.began),
                )
                measurement = measure(inputs, job.prices)
                state, proven = measurement.state, proven_in(job.target, "", "*/")
                # the smaller first: what it proves is a candidate of the larger
                for place, budget in sorted(job.budgets.items(), key=lambda one: one[1]):
                    if place.name in state.finished:
                        say(f"kept: {place}, which the interrupted run finished")
                        worst = max(worst, state.finished[place.name])
                        results[place.name] = stored(place) if team.leads else {}
                        continue
                    about = f" for {place.name}" * several
                    result = calibration.decided(measurement, budget, proven)
                    proven += [result.plan] * result.met
                    one = replace(job, target=place)
                    code, results[place.name] = 0 if result.met else BUDGET_NOT_MET, {}
                    if team.leads:
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
    if team.leads:
        forget(job.target)
    return worst, results if several else next(iter(results.values()))
