"""`adaattn calibrate`: a loss budget in, a verified plan out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaattn_hf.eval.progress import beating, tell
from adaattn_hf.eval.settings import DTYPE, Masking, Source

from ..calibration.settings import CalibrationSettings
from ..errors import ModelUnavailable, UsageError
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_json
from .options import Threads, folders, tokens, use_threads, writable
from .place import Place, refuse_other_plan

PANELS = {
    "Basic": ("data", "budget", "verify_data", "output_dir", "lengths", "dtype", "device", "resume"),
    "Verification": ("held_out", "most_held_out", "tries", "bolder", "top1", "needles_lost"),
    "Search": (
        "optimize", "kv_bytes", "families", "minutes", "sequences", "rows", "labels", "joint", "prices",
        "decode_tokens", "batch", "captured",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Asked(Source):
    """Options of a calibration that are not settings.

    Attributes:
        data: Text in UTF-8: .txt, .md, .jsonl with a field text, or directories of them; each source counts equally.
            Default for the packaged model: the packaged pages.
        budget: Allowed rise of perplexity (0.1%) or loss in nats/token (1e-3). Given several times: one measurement,
            and a plan for each. Default: 0.1%; 1% for the packaged model.
        verify_data: Held-out text from other sources; the plan must pass on each. Default: other parts of --data.
        lengths: Lengths in tokens, rising (1k,4k or 4096); tokens beyond the longest are exact. Default: 4096, or
            what the model and the text can fill.
        risks: Reuse the risks of this plan (directory or file), made from the same weights and text on any machine.
        prices: Use this adaattn_prices.json of an earlier run; the plan is then reproducible byte for byte.
        dtype: Of the weights; auto: the checkpoint's.
        resume: Continue the interrupted run in the plan's directory.
        verbose: Also print nats, levels and versions.
        quiet: No progress.
    """

    data: tuple[Path, ...] = ()
    budget: tuple[str, ...] = ()
    verify_data: tuple[Path, ...] = ()
    lengths: tuple[int, ...] = field(default=(), metadata={"read": tokens})
    risks: Path | None = field(default=None, metadata={"option": "--from"})
    prices: Path | None = None
    dtype: str = field(default="auto", metadata=DTYPE)
    resume: bool = False
    verbose: bool = False
    quiet: bool = False


@with_options(asked=Asked, place=Place, settings=CalibrationSettings, masking=Masking)
def calibrate(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or directory of a causal or masked LM. Default: the packaged LLaMA.")
    ] = None,
    *,
    asked: Asked,
    place: Place,
    settings: CalibrationSettings,
    masking: Masking,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Make a plan for a loss budget, verify it on held-out text, and save it.

    Without MODEL it uses a small LLaMA and the pages that come with the package: offline, about a minute.

    Under `accelerate launch` or `torchrun` the processes share the work and make one plan.

    Exit codes: 0 a plan passed for every budget; 2 wrong arguments; 3 a file cannot be read or written; 4 no plan
    passed for a budget, so it stays exact; 6 out of memory; 130 interrupted.
    """
    # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.eval.team import join, leave
    from adaattn_hf.eval.texts import refuse_repeats
    from adaattn_hf.patches.checkpoint import load, resolve_device
    from adaattn_hf.patches.plans.positions import stated_positions

    from ..calibration.inputs import refuse_longer
    from ..calibration.state import kept_in, refuse_interrupted
    from ..plans.wording import allowed
    from .calibration_job import job_of, out_of_memory, run, scoring_of
    from .fit import fit_to_text, opened
    from .memory import room_or_sentence

    console = Console(stderr=as_json)
    with ending(wrong=(ValueError,)):
        target = place.directory(model)
        places = place.each(model, folders(asked.budget))

    def kept() -> str:
        if kept_in(target) is None:
            return "nothing was measured yet, so nothing is kept"
        return f"what is measured is kept in {target}; the same command with --resume goes on"

    with ending(default=target, stays=kept, kept=kept, wrong=(ValueError, FileNotFoundError, ModelUnavailable)):
        use_threads(threads)
        resolve_device(asked.device)
        job = job_of(model, asked, settings, target, places)
        refuse_repeats(job.data, job.verify_data)
        writable(target, "output_dir")
        if not asked.resume:
            refuse_interrupted(target)
        team, rank = join()
        if team.size > 1 and asked.device == "auto":
            raise UsageError(
                f"device: got 'auto' in {team.size} processes, expected it in one, since it takes all GPUs; start one "
                "process, or leave --device out and each takes a GPU of its own"
            )
        config, encode = opened(job.model, **asked.source())
        positions, silent = stated_positions(config), asked.quiet or not team.leads
        others = () if place.in_place else places
        for directory in others:  # what the configuration says, before weights and text are read
            refuse_other_plan(directory, config)
        if asked.lengths:
            refuse_longer(job.settings.lengths, positions, job.model)
        loading = partial("loading {}: {:.0f} s".format, job.model)
        full = partial(out_of_memory, job, "the machine", "")
        with beating(loading, console, quiet=silent), room_or_sentence(full):
            loaded = load(job.model, dtype=asked.dtype, device="cpu", implementation="adaattn", **asked.source())
        scoring = scoring_of(loaded, masking)
        for directory in others:
            refuse_other_plan(directory, config, loaded.model)
        if team.leads:
            tell(console, place.sentence(target, model))
            tell(console, f"budget: perplexity {', '.join(map(allowed, job.budgets.values()))}")
        if not asked.lengths:
            fitted, sentence = fit_to_text(job.settings, encode, job.data, job.verify_data, positions)
            job = replace(job, settings=fitted)
            if not silent:
                tell(console, sentence)
        code, found = run(job, loaded, scoring, console, team, rank)
        if as_json and team.leads:
            print_json(found)
    leave()
    if code:
        raise typer.Exit(code)
