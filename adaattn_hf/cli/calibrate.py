"""`adaattn calibrate`: a loss budget in, a verified plan out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import DataUnavailable, OutOfMemory, UsageError
from .fields import with_options
from .interrupt import interrupted, of_file, terminate_like_interrupt
from .interrupt import leave as ended
from .json_output import AsJson
from .place import PLAN_DIRECTORY, Place, refuse_other_plan
from .shown import Shown, tell


@with_options(place=Place, shown=Shown)
def calibrate(
    *,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id or directory of a causal or masked LM. Default: the packaged LLaMA."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text in UTF-8: .txt, .md, .jsonl with a field text, or directories of them; several sources count "
            "alike. "
            "Default, for the packaged model: the packaged pages."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Rise of the perplexity (0.1%) or nats/token (1e-3). Default: the preset's, or 0.1%; 1% for the "
            "packaged model."
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A preset whose budget is taken: balanced, fast, long_context.")
    ] = None,
    verify_data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Held-out text of other sources, each of them proved. Default: other parts of --data."
        ),
    ] = None,
    place: Place,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Length bins in tokens, rising (4096 or 4k); longer sequences are exact. "
            "Default: 4096, or what the model and the text can fill."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    sequences: Annotated[int, typer.Option(help="Sequences per length that risks are measured on.")] = 4,
    rows: Annotated[int, typer.Option(help="Query rows sampled per sequence.")] = 256,
    labels: Annotated[int, typer.Option(help="Label draws per sequence, one backward pass each.")] = 2,
    joint: Annotated[int, typer.Option(help="Sequences per length that re-scale the risks.")] = 3,
    held_out: Annotated[
        int, typer.Option(help="Held-out sequences per length at the first look at a plan.")
    ] = 12,
    most_held_out: Annotated[
        int,
        typer.Option(help="Held-out sequences per length at the last look, where the first do not decide."),
    ] = 36,
    tries: Annotated[int, typer.Option(help="Plans that may fail before the answer is exact.")] = 3,
    bolder: Annotated[int, typer.Option(help="Bolder plans that may follow one that passed with room.")] = 2,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no further plan when so many minutes are over.")
    ] = None,
    top1: Annotated[
        str | None,
        typer.Option(help="Least agreement on the likeliest token (99%). Default: as the budget."),
    ] = None,
    kl_p999: Annotated[
        float | None,
        typer.Option(help="Largest 99.9th percentile of the KL of a token, nats. Default: no such gate."),
    ] = None,
    needles: Annotated[
        str | None,
        typer.Option(help="Share of the needles that may be lost (2%). Default: 2% beyond chance."),
    ] = None,
    mask_share: Annotated[
        float, typer.Option(help="Share of the tokens that a masked LM is asked for at a time.")
    ] = 0.15,
    maskings: Annotated[
        int, typer.Option(help="Times that each sequence is masked anew, for a masked LM.")
    ] = 4,
    families: Annotated[
        str, typer.Option(help="Kinds of choices: window,rank,bf16,int8.")
    ] = "window,bf16,int8,rank",
    decode_tokens: Annotated[int, typer.Option(help="Decode steps per prefill, for the prices.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences at once, for the prices.")] = 1,
    captured: Annotated[
        bool,
        typer.Option(
            "--captured",
            help="Price decode steps as in captured CUDA graphs, which generation with a static cache makes.",
        ),
    ] = False,
    prices: Annotated[
        Path | None, typer.Option(help="Prices measured before: the plan is then the same byte for byte.")
    ] = None,
    optimize: Annotated[
        str, typer.Option(help="time; or memory: the smallest cache inside the budget, windows alone.")
    ] = "time",
    kv_bytes: Annotated[
        str | None,
        typer.Option(help="Bytes of the cache at the longest length, as a share of the model's (0.4x)."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda. Default: cuda where there is one.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the interrupted run in the plan's directory.")
    ] = False,
    shown: Shown,
    as_json: AsJson = False,
) -> None:
    """Turn a loss budget into a plan per layer and head, prove it on held-out text, and store it.

    Without MODEL a small LLaMA and the pages that come with the package are used, offline and in about a minute.

    Exit codes: 0 a plan passed; 2 wrong arguments; 3 a file cannot be read or written; 4 the budget cannot be met and
    the plan is exact; 6 memory does not suffice; 130 interrupted.
    Under `accelerate launch` or `torchrun` the processes share the sequences and make the same plan.
    """
    # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.eval.progress import beating
    from adaattn_hf.patches.checkpoint import resolve_device

    from ..calibration.inputs import refuse_longer
    from ..calibration.settings import CalibrationSettings
    from ..calibration.state import refuse_interrupted
    from ..calibration.team import join, leave
    from ..calibration.texts import refuse_repeats
    from .calibration_job import Job, fitted, named_or_packaged, out_of_memory, print_calibration, run
    from .loading import load, opened
    from .memory import room_or_sentence
    from .options import kinds, known_prices, share, times, tokens, use_threads, writable

    console = Console(stderr=as_json)
    target = place.out or Path(PLAN_DIRECTORY)
    try:
        target = place.directory(model)
        use_threads(threads)
        resolve_device(device)
        material = named_or_packaged(model, data, verify_data, budget, preset)
        settings = CalibrationSettings(
            budget=material.budget,
            lengths=tokens(lengths or "4096"),
            seed=seed,
            sequences=sequences,
            rows=rows,
            labels=labels,
            joint=joint,
            held_out=held_out,
            most_held_out=max(held_out, most_held_out),
            tries=tries,
            bolder=bolder,
            minutes=minutes,
            top1=share(top1, "top1") or 0.0,
            kl_p999=kl_p999,
            needles_lost=share(needles, "needles"),
            families=kinds(families),
            decode_tokens=decode_tokens,
            batch=batch,
            captured=captured,
            optimize=optimize,
            kv_bytes=times(kv_bytes, "kv_bytes"),
        )
        job = Job(
            model=material.model,
            gguf_file=gguf_file,
            target=target,
            data=material.data,
            verify_data=material.verify_data,
            settings=settings,
            prices=known_prices(prices),
            device=device,
            resume=resume,
            shown=shown,
        )
        refuse_repeats(job.data, job.verify_data)
        writable(target, "out")
        if not resume:
            refuse_interrupted(target)
        with terminate_like_interrupt():
            team, rank = join()
            if team.leads:
                tell(console, place.sentence(target, model))
            known = opened(job.model, job.gguf_file)
            if lengths is None:
                job = fitted(job, known, console if team.leads and not shown.quiet else None)
            else:
                refuse_longer(job.settings.lengths, known.positions, job.model)
            loading = partial("loading {}: {:.0f} s".format, material.model)
            full = partial(out_of_memory, job, "the machine", "")
            silent = shown.quiet or not team.leads
            with beating(loading, console, quiet=silent), room_or_sentence(full):
                loaded = load(
                    material.model, dtype=dtype, gguf_file=gguf_file, mask_share=mask_share, maskings=maskings
                )
            if not place.in_place:
                refuse_other_plan(target, loaded.model)
            code, found = run(job, loaded, console, team, rank)
        if as_json and team.leads:
            print_calibration(found)
    except KeyboardInterrupt:
        interrupted(f"finished work is kept in {target}; the same command with --resume goes on")
    except OutOfMemory as error:
        ended(error)
    except (ValueError, FileNotFoundError) as error:
        ended(UsageError(str(error)))
    except OSError as error:
        ended(DataUnavailable(f"{of_file(error, target)}; what is finished is kept, --resume goes on"))
    leave()
    if code:
        raise typer.Exit(code)
