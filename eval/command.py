"""`adaattn eval`: the arguments, the progress bar, the exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaattn_hf.eval.errors import EXIT_CODES, EvalError, UsageError, leave
from adaattn_hf.eval.progress import shown_progress
from adaattn_hf.files import write_atomically
from adaattn_hf.interrupt import terminate_like_interrupt

_EXAMPLES = """
Measure an attention implementation against stock attention on real text.

Without MODEL the three small models that come with the package are measured on their held-out text, offline.
Both arms read the same tokens in the same batches. The report gives perplexity (token, word, byte), the
paired difference with a confidence interval over documents, KL, top-1 agreement, the activation rate, speed
and memory. An interrupted run (Ctrl-C) goes on with --resume.

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
    against: Annotated[str, typer.Option(help="Stock implementation that it replaces.")] = "sdpa",
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
        str, typer.Option(help="rolling (lm-evaluation-harness) or strided (Transformers' documentation).")
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
) -> None:
    """Measure an attention implementation against stock attention on real text."""
    console = Console(stderr=False)
    given = {k: v for k, v in locals().items() if k != "console"}
    errors = Console(stderr=True)
    where = output or Path("results") / "eval" / datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
    try:
        with terminate_like_interrupt():
            broken = _run(given, where, console)
    except EvalError as error:
        leave(error)
    except KeyboardInterrupt:
        errors.print(
            f"interrupted: finished work is kept in {where}; the same command with --resume --output "
            f"{where} goes on",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    for sentence in broken:
        errors.print(f"quality: {sentence}", style="red", markup=False, highlight=False, soft_wrap=True)
    if broken:
        raise typer.Exit(1)


evaluate.__doc__ = HELP


def _run(given: dict[str, Any], where: Path, console: Console) -> list[str]:
    """Measure everything that was asked for; the sentences are the bounds that were broken."""
    if given["resume"] and given["overwrite"]:
        raise UsageError("resume: got both --resume and --overwrite, expected one of them")
    if given["resume"] and given["output"] is None:
        raise UsageError("resume: got no --output, expected the directory of the interrupted run")
    import torch

    from adaattn_hf.calibration.arguments import writable
    from adaattn_hf.eval import bounds, corpora, report, runner
    from adaattn_hf.eval.checkpoint import load
    from adaattn_hf.eval.settings import Settings

    if given["threads"] is not None:
        if given["threads"] < 1:
            raise UsageError(f"threads: got {given['threads']}, expected at least 1")
        torch.set_num_threads(given["threads"])
    try:
        if given["output"] is not None:
            writable(where, "output")
    except ValueError as error:
        raise UsageError(str(error)) from error
    settings = Settings(**{name: given[name] for name in Settings.__dataclass_fields__})
    if given["model"] is None:
        from adaattn_hf.eval import showcase

        return showcase.run(given, settings, where, console)
    specs: Sequence[str] = given["data"] or ["wikitext"]
    found = [corpora.load(s, split=given["split"], separator=given["document_separator"]) for s in specs]
    if len({c.name for c in found}) < len(found):
        raise UsageError(
            f"data: got {', '.join(c.name for c in found)}, expected different names: each has a directory"
        )
    keywords = ("dtype", "device", "tokenizer", "revision", "gguf_file", "objective", "trust_remote_code")
    chosen = {name: given[name] for name in keywords} | {"dtype": given["dtype"] or "float32"}
    checkpoint = load(given["model"], **chosen)
    reports, broken = [], []
    for corpus in found:
        with shown_progress(f"{checkpoint.name} on {corpus.name}", given["quiet"], console) as tell:
            result = runner.evaluate(
                checkpoint,
                corpus,
                settings,
                output=where / corpus.name,
                resume=given["resume"],
                overwrite=given["overwrite"],
                progress=tell,
            )
        kept, sentences = bounds.check(result, given["max_delta_nll"], given["max_ppl_ratio"])
        result["bounds"] = kept
        runner.write_json(where / corpus.name / runner.REPORT, result)
        broken += sentences
        reports.append(result)
        if not given["quiet"]:
            console.print(report.terminal_table(result))
    write_atomically(where / "report.md", report.markdown(reports))
    console.print(f"reports: {where}", markup=False, highlight=False, soft_wrap=True)
    return broken


if __name__ == "__main__":
    from adaattn_hf.cli import main

    main(["eval", *sys.argv[1:]])
