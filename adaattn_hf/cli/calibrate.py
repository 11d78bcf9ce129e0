"""`adaattn calibrate`: a loss budget in, a verified plan out."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from adaattn_hf.eval.progress import beating, tell

from ..calibration.settings import CalibrationSettings, Masking
from .asked import Asked
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_json
from .options import Threads, use_threads, writable
from .place import Place, refuse_other_plan


@with_options(asked=Asked, place=Place, settings=CalibrationSettings, masking=Masking)
def calibrate(
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id or directory of a causal or masked LM. Default: the packaged LLaMA."),
    ] = None,
    *,
    asked: Asked,
    place: Place,
    settings: CalibrationSettings,
    masking: Masking,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Turn a loss budget into a plan per layer and head, prove it on held-out text, and store it.

    Without MODEL a small LLaMA and the pages that come with the package are used, offline and in about a minute.

    Exit codes: 0 a plan passed; 2 wrong arguments; 3 a file cannot be read or written; 4 the budget cannot be met and
    the plan is exact; 6 memory does not suffice; 130 interrupted.
    Under `accelerate launch` or `torchrun` the processes share the sequences and make the same plan.
    """
    # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.patches.checkpoint import resolve_device

    from ..calibration.inputs import refuse_longer
    from ..calibration.state import refuse_interrupted
    from ..calibration.team import join, leave
    from ..calibration.texts import refuse_repeats
    from .calibration_job import fitted, job_of, out_of_memory, run
    from .loading import load, opened
    from .memory import room_or_sentence

    console = Console(stderr=as_json)
    with ending(wrong=(ValueError,)):
        target = place.directory(model)
    with ending(
        default=target,
        stays="what is finished is kept, --resume goes on",
        kept=lambda: f"finished work is kept in {target}; the same command with --resume goes on",
        wrong=(ValueError, FileNotFoundError),
    ):
        use_threads(threads)
        resolve_device(asked.device)
        job = job_of(model, asked, settings, target)
        refuse_repeats(job.data, job.verify_data)
        writable(target, "out")
        if not asked.resume:
            refuse_interrupted(target)
        team, rank = join()
        if team.leads:
            tell(console, place.sentence(target, model))
        known = opened(job.model, **asked.source())
        silent = asked.quiet or not team.leads
        if asked.lengths:
            refuse_longer(job.settings.lengths, known.positions, job.model)
        else:
            job = fitted(job, known, None if silent else console)
        loading = partial("loading {}: {:.0f} s".format, job.model)
        full = partial(out_of_memory, job, "the machine", "")
        with beating(loading, console, quiet=silent), room_or_sentence(full):
            loaded = load(job.model, dtype=asked.dtype, masking=masking, **asked.source())
        if not place.in_place:
            refuse_other_plan(target, loaded.model)
        code, found = run(job, loaded, console, team, rank)
        if as_json and team.leads:
            print_json(found)
    leave()
    if code:
        raise typer.Exit(code)
