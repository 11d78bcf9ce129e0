"""`adaattn eval`: perplexity of one attention against another on real text, with its exit codes."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .._files import write_atomically
from ..errors import EXIT_CODES, DataUnavailable, EvalError, UsageError
from .interrupt import interrupted, leave, of_file, terminate_like_interrupt
from .json_output import AsJson, print_reports, tables_aside
from .shown import tell

if TYPE_CHECKING:
    from adaattn_hf.eval.settings import Limits, Loading, Output, Settings, Text

_EXAMPLES = """
Measure an attention implementation against stock attention on real text.

Without MODEL the three small models that come with the package are measured on their held-out text, offline.
Both arms read the same tokens in the same batches. The report gives perplexity (token, word, byte), the
paired difference with a confidence interval over documents, KL, top-1 agreement, the activation rate, speed
and memory. An interrupted run (Ctrl-C) goes on with --resume. Started by `accelerate launch` or `torchrun`,
each process measures its share of the batches.

Exit codes: {codes}.
"""

HELP = _EXAMPLES.format(codes="; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()))


def evaluate(
    model: Annotated[str | None, typer.Argument(help="Hub id or directory of a causal or masked LM.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="wikitext, lambada (through datasets), wikitext:PATH, lambada:PATH, or a text or "
            "jsonl file or a directory of them. May be given several times. Default: wikitext."
        ),
    ] = None,
    impl: Annotated[str, typer.Option(help="Attention implementation under test.")] = "adaattn",
    against: Annotated[
        str | None,
        typer.Option(
            help="Stock implementation that it replaces. Default: sdpa, with --against-plan that of --impl."
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="File or directory of the plan that --impl runs; none: without the plan that MODEL carries."
        ),
    ] = None,
    against_plan: Annotated[
        str | None,
        typer.Option(help="Compare with this plan (or none: with exact attention of ours), paired."),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Read windows in pieces over a cache, as decoding does, that stores model (numbers), int8 or k8v4; "
            "the others read over Transformers' own."
        ),
    ] = None,
    cache_piece: Annotated[int, typer.Option(help="Tokens of such a piece.")] = 64,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", help="Heads with a window in the plan keep it alone in that cache."),
    ] = False,
    anchor: Annotated[
        str | None,
        typer.Option(
            help="Second stock implementation (eager, say): its distance is the resolution of the dtype."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default), bfloat16, float16 or auto (the checkpoint's).")
    ] = None,
    windows: Annotated[
        str, typer.Option(help="rolling (that of lm-eval) or strided (Transformers' documentation).")
    ] = "rolling",
    context: Annotated[
        int | None, typer.Option(help="Tokens of a window. Default: the model's maximum.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows. Default: the context.")] = None,
    batch_size: Annotated[
        int, typer.Option(help="Windows per forward pass; does not change perplexity.")
    ] = 1,
    padding: Annotated[
        str,
        typer.Option(
            help="none: batches of equal lengths. right, left: windows as they come, padded and masked."
        ),
    ] = "none",
    limit_docs: Annotated[int | None, typer.Option(help="Only the first so many documents.")] = None,
    limit_tokens: Annotated[
        int | None, typer.Option(help="Only the first so many tokens of the text.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for journals and reports. Default: a new one under results/eval."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the interrupted run in --output.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin again where --output has a run.")
    ] = False,
    max_delta_nll: Annotated[
        float | None,
        typer.Option(help="Fail (exit 1) where the one-sided 95 % bound of Δnll, nats/token, is above."),
    ] = None,
    max_ppl_ratio: Annotated[
        float | None,
        typer.Option(help="Fail (exit 1) where that bound's perplexity ratio is above (1.001, say)."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, where it is not the model's own.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1. Default: cuda where there is one.")
    ] = None,
    objective: Annotated[str, typer.Option(help="auto, causal or masked.")] = "auto",
    mask_fraction: Annotated[
        float, typer.Option(help="Masked LMs: share of the tokens that is scored.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of that sample.")] = 0,
    prefix_token: Annotated[
        int | None, typer.Option(help="Token before each document. Default: BOS, else EOS.")
    ] = None,
    add_bos: Annotated[
        bool | None,
        typer.Option(help="Whether the tokenizer adds its special tokens. Default: its own setting."),
    ] = None,
    document_separator: Annotated[
        str | None, typer.Option(help="Text between the documents of a plain file (<|endoftext|>, say).")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a dataset.")] = "test",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model bring code.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar and no table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure an attention implementation against stock attention on real text."""
    # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.eval.settings import Limits, Loading, Output, Settings, Text

    directory = output or Path("results") / "eval" / datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    try:
        with terminate_like_interrupt(), tables_aside(as_json):
            _use_threads(threads)
            made, broken = _run(
                model,
                Text(tuple(data or ()), split, document_separator),
                Settings(
                    impl=impl,
                    against=against or ("sdpa" if against_plan is None else impl),
                    anchor=anchor,
                    windows=windows,
                    context=context,
                    stride=stride,
                    batch_size=batch_size,
                    padding=padding,
                    limit_docs=limit_docs,
                    limit_tokens=limit_tokens,
                    mask_fraction=mask_fraction,
                    seed=seed,
                    prefix_token=prefix_token,
                    add_bos=add_bos,
                    plan=plan,
                    against_plan=against_plan,
                    cache=cache,
                    cache_piece=cache_piece,
                    streaming=streaming,
                ),
                Loading(dtype, device, tokenizer, revision, gguf_file, objective, trust_remote_code),
                Limits(max_delta_nll, max_ppl_ratio),
                Output(directory, resume, overwrite, quiet),
                chosen=output is not None,
            )
    except EvalError as error:
        leave(error)
    except OSError as error:
        why = of_file(error, directory)
        leave(DataUnavailable(f"file: {why}; finished batches are kept, and --resume goes on with them"))
    except KeyboardInterrupt:
        interrupted(
            f"finished work is kept in {directory}; the same command with --resume --output {directory} goes on"
        )
    if as_json and made:
        print_reports(made)
    for sentence in broken:
        tell(Console(stderr=True, style="red"), f"quality: {sentence}")
    if broken:
        raise typer.Exit(1)


evaluate.__doc__ = HELP


def _use_threads(threads: int | None) -> None:
    from .options import use_threads

    try:
        use_threads(threads)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _run(
    model: str | None,
    text: Text,
    settings: Settings,
    loading: Loading,
    limits: Limits,
    output: Output,
    *,
    chosen: bool,
) -> tuple[list[Path], list[str]]:
    """Measure everything that was asked for; the files are the reports, the sentences the bounds that were broken."""
    if output.resume and output.overwrite:
        raise UsageError("resume: got both --resume and --overwrite, expected one of them")
    if output.resume and not chosen:
        raise UsageError("resume: got no --output, expected the directory of the interrupted run")
    from adaattn_hf.eval import bounds, corpora, report, runner, tasks
    from adaattn_hf.eval.progress import shown_progress
    from adaattn_hf.patches.checkpoint import load, read_config

    from ..calibration import team
    from .memory import room_or_sentence

    console = Console(stderr=False)
    if chosen or model is None:
        _refuse_unwritable(output.directory)
    if model is None:
        from adaattn_hf.eval import showcase

        return showcase.run(text, settings, loading, limits, output, console)
    read_config(model, **loading.source())  # a wrong name is told before text is looked for
    texts = [corpora.load(s, split=text.split, separator=text.separator) for s in text.specs or ("wikitext",)]
    if len({c.name for c in texts}) < len(texts):
        raise UsageError(
            f"data: got {', '.join(c.name for c in texts)}, expected different names: each has a directory"
        )
    for corpus in texts:
        tasks.check(corpus, settings)
    crew, device_index = team.join()
    if crew.size > 1 and loading.device in (None, "cuda") and _sees_cuda():
        loading = replace(loading, device=f"cuda:{device_index}")
    rolls = settings.windows == "rolling" and any(corpus.kind != "lastword" for corpus in texts)
    _refuse_unwritable(output.directory)  # of a default place last: it is made here

    def no_room(said: str) -> str:
        return _out_of_memory(settings, output, said)

    with room_or_sentence(no_room):
        checkpoint = load(model, **loading.keywords(), prefixed=rolls and settings.prefix_token is None)
    reports, files, broken = [], [], []
    for corpus in texts:
        label = f"{checkpoint.name} on {corpus.name}"
        with room_or_sentence(no_room), shown_progress(label, output.quiet or not crew.leads) as progress:
            result = runner.evaluate(
                checkpoint,
                corpus,
                settings,
                output=output.directory / corpus.name,
                resume=output.resume,
                overwrite=output.overwrite,
                progress=progress,
            )
        result["bounds"], sentences = bounds.check(result, limits.max_delta_nll, limits.max_ppl_ratio)
        broken += sentences
        reports.append(result)
        if not crew.leads:
            continue
        files.append(output.directory / corpus.name / runner.REPORT)
        runner.write_json(files[-1], result)
        if not output.quiet:
            console.print(report.terminal_table(result))
    team.leave()
    if crew.leads:
        write_atomically(output.directory / "report.md", report.markdown(reports))
        tell(console, f"reports: {output.directory}")
    return files, broken if crew.leads else []


def _out_of_memory(settings: Settings, output: Output, said: str) -> str:
    """What to say where there is no room: what would fit, and what is kept."""
    fits = [f"fewer windows at once (--batch-size {settings.batch_size // 2})"] * (settings.batch_size > 1)
    fits.append(
        "shorter windows (--context)" if settings.context is None else f"--context {settings.context // 2}"
    )
    return (
        f"memory: none is left ({said}), expected room for the weights and a batch; what would fit: {', '.join(fits)}, "
        "or another --dtype or --device; finished batches are kept: with the same settings --resume --output "
        f"{output.directory} goes on with them, other settings need another --output"
    )


def _refuse_unwritable(directory: Path) -> None:
    from .options import writable

    try:
        writable(directory, "output")
    except ValueError as error:
        raise UsageError(str(error)) from error


def _sees_cuda() -> bool:
    # torch is imported when a command runs
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    from .main import main

    main(["eval", *sys.argv[1:]])
