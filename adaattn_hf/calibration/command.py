"""`adaattn calibrate`: a loss budget in, a verified plan beside the weights out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaattn_hf.calibration.arguments import (
    kinds,
    known_prices,
    nats,
    texts,
    tokens,
    use_threads,
    writable,
)
from adaattn_hf.calibration.team import join, leave
from adaattn_hf.interrupt import terminate_like_interrupt

__all__ = ["BUDGET_NOT_MET", "calibrate", "nats", "tokens"]

BUDGET_NOT_MET = 4
"""Exit code when the budget cannot be met and the plan is exact."""


def calibrate(
    model: Annotated[str, typer.Argument(help="Hub id or directory of a causal or masked LM.")],
    data: Annotated[
        list[Path], typer.Option(help="Text: .txt, .jsonl with a field text, or directories of them.")
    ],
    budget: Annotated[str, typer.Option(help="Rise of the perplexity (0.1%) or nats/token (1e-3).")] = "0.1%",
    verify_data: Annotated[
        list[Path] | None,
        typer.Option(help="Held-out text of another source. Default: other parts of --data."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the plan goes. Default: MODEL, if it is a directory.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Length bins in tokens, rising (4096 or 4k); longer sequences are exact. "
            "Default: 4096, or the model's positions where they are fewer."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    sequences: Annotated[int, typer.Option(help="Sequences per length that risks are measured on.")] = 4,
    rows: Annotated[int, typer.Option(help="Query rows sampled per sequence.")] = 256,
    labels: Annotated[int, typer.Option(help="Label draws per sequence, one backward pass each.")] = 2,
    direct: Annotated[
        int, typer.Option(help="Pairs of head and choice whose loss forward passes of their own measure.")
    ] = 0,
    joint: Annotated[int, typer.Option(help="Sequences per length that re-scale the risks.")] = 3,
    held_out: Annotated[int, typer.Option(help="Held-out sequences per length and try.")] = 12,
    tries: Annotated[int, typer.Option(help="Plans verified before the answer is exact.")] = 3,
    mask_share: Annotated[
        float, typer.Option(help="Share of the tokens that a masked LM is asked for at a time.")
    ] = 0.15,
    maskings: Annotated[
        int, typer.Option(help="Times that each sequence is masked anew, for a masked LM.")
    ] = 4,
    families: Annotated[
        str, typer.Option(help="Kinds of choices: window,blocks,rank,bf16,int8.")
    ] = "window,bf16,int8,rank",
    decode_tokens: Annotated[int, typer.Option(help="Decode steps per prefill, for the prices.")] = 64,
    prices: Annotated[
        Path | None, typer.Option(help="Prices measured before: the plan is then the same byte for byte.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda. Default: cuda where there is one.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the interrupted run in --out.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Turn a loss budget into a plan per layer and head, prove it on held-out text, and store it with the model.

    Exit codes: 0 a plan passed; 2 wrong arguments; 4 the budget cannot be met and the plan is exact; 130 interrupted.
    Under `accelerate launch` or `torchrun` the processes share the sequences and make the same plan.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        target = out if out is not None else Path(model)
        if out is None and not target.is_dir():
            raise ValueError(
                f"out is absent and {model!r} is no directory; say where the plan goes with --out DIRECTORY"
            )
        with terminate_like_interrupt():
            code = _run(locals(), console)
    except KeyboardInterrupt:
        errors.print(
            f"interrupted: finished work is kept in {target}; the same command with --resume goes on",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    except (ValueError, FileNotFoundError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    leave()
    if code:
        raise typer.Exit(code)


def _run(given: dict[str, Any], console: Console) -> int:
    import torch

    from adaattn_hf.calibration.calibrate import CalibrationSettings, save_plan
    from adaattn_hf.calibration.calibrate import calibrate as run
    from adaattn_hf.calibration.loading import load
    from adaattn_hf.calibration.measure import most_positions
    from adaattn_hf.calibration.progress import display
    from adaattn_hf.eval.checkpoint import resolve_device
    from adaattn_hf.files import write_atomically
    from adaattn_hf.plan_picture import heat_map, summary

    use_threads(given["threads"])
    settings = CalibrationSettings(
        budget=nats(given["budget"]),
        lengths=tokens(given["lengths"] or "4096"),
        families=kinds(given["families"]),
        decode_tokens=given["decode_tokens"],
        **{
            name: given[name]
            for name in ("seed", "sequences", "rows", "labels", "direct", "joint", "held_out", "tries")
        },
    )
    known = known_prices(given["prices"])
    texts([*given["data"], *(given["verify_data"] or [])])
    target: Path = given["target"]
    writable(target, "out")
    device = resolve_device(given["device"])
    crew, place = join()
    if device.type == "cuda" and device.index is None and crew.size > 1:
        device = torch.device("cuda", place)
    loaded = load(
        given["model"], **{name: given[name] for name in ("dtype", "gguf_file", "mask_share", "maskings")}
    )
    model = loaded.model.to(device)
    positions = most_positions(model)
    if given["lengths"] is None and positions is not None:
        settings = replace(settings, lengths=(min(positions, *settings.lengths),))

    with display(settings, console, given["quiet"] or not crew.leads) as progress:
        result = run(
            model,
            loaded.encode,
            given["data"],
            settings,
            verify_data=given["verify_data"],
            scoring=loaded.scoring,
            prices=known,
            directory=target,
            resume=given["resume"],
            progress=progress,
        )
    code = 0 if result.met else BUDGET_NOT_MET
    if not crew.leads:
        return code
    save_plan(model, result, target)
    write_atomically(target / "adaattn_prices.json", result.report.pop("prices").encode())
    write_atomically(
        target / "adaattn_report.json", (json.dumps(result.report, indent=1, sort_keys=True) + "\n").encode()
    )
    console.print(heat_map(result.plan))
    lines = summary(result.plan)
    for line in [*(lines if result.met else [*lines[:-1], result.sentence]), f"plan: {target}"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return code
