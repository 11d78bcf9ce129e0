"""`adaattn eval`: compares the perplexity of two attention implementations on real text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from adaattn_hf.eval.progress import shown_progress, tell
from adaattn_hf.eval.settings import Limits, Loading, Output, Settings, Text

from .._files import write_atomically
from ..errors import UsageError
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_json, prints_aside
from .options import Threads, use_threads, writable

if TYPE_CHECKING:  # what loads torch is imported when the command runs, not when its help is asked for
    from adaattn_hf.eval.runner import Run

PANELS = {
    "Basic": ("data", "plan", "attn_implementation", "baseline", "dtype", "device", "batch_size", "output_dir"),
    "Verification": ("max_delta_nll", "max_ppl_ratio", "baseline_plan", "anchor"),
}


@with_options(text=Text, settings=Settings, loading=Loading, limits=Limits, output=Output)
def evaluate(
    model: Annotated[str | None, typer.Argument(help="Hub id or directory of a causal or masked LM.")] = None,
    *,
    text: Text,
    settings: Settings,
    loading: Loading,
    output: Output,
    limits: Limits,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compare an attention implementation with stock attention on real text.

    Without MODEL it measures the three small models that come with the package, on their held-out text, offline. All
    arms read the same tokens in the same batches. The report has perplexity (token, word, byte), the paired difference
    with a confidence interval over documents, KL, top-1 agreement, activation rate, speed and memory. --resume
    continues an interrupted run (Ctrl-C). Under `accelerate launch` or `torchrun` the processes share the batches.

    Exit codes: 0 done; every bound that was asked for is kept; 1 measured, but a bound that was asked for
    (--max-delta-nll, --max-ppl-ratio) is broken; 2 usage: an argument is wrong, or two contradict each other; 3 data
    unavailable: the corpus is neither local, nor cached, nor to be downloaded, or cannot be read; 4 model unavailable:
    no such checkpoint, no tokenizer, no output head, or no such attention; 5 the output directory belongs to another
    run (the reason names what differs); 6 out of memory: what would fit is said; finished work is kept and --resume
    continues it; 130 interrupted; finished work is kept and --resume continues it.
    """
    directory = output.directory
    with (
        ending(
            default=directory,
            stays="finished batches are kept, and --resume goes on with them",
            kept=lambda: (
                f"finished work is kept in {directory}; the same command with --resume --output-dir {directory} goes on"
            ),
        ),
        prints_aside(as_json),
    ):
        use_threads(threads)
        reports, broken = _run(model, text, settings, loading, limits, output, Console(stderr=as_json))
    if as_json and reports:
        print_json(reports[0] if len(reports) == 1 else reports)
    for sentence in broken:
        tell(Console(stderr=True, style="red"), f"quality: {sentence}")
    if broken:
        raise typer.Exit(1)


def _run(
    model: str | None,
    text: Text,
    settings: Settings,
    loading: Loading,
    limits: Limits,
    output: Output,
    console: Console,
) -> tuple[list[dict[str, Any]], list[str]]:
    from adaattn_hf.eval import bounds, report, runner, showcase, team
    from adaattn_hf.patches.checkpoint import resolve_device

    from .memory import room_or_sentence

    resolve_device(loading.device)
    writable(output.directory, "output_dir")
    if model is None:
        team.join()
        runs = showcase.runs(text, settings, loading, limits)
    else:
        runs = _runs(model, text, settings, loading, output)
    reports: list[dict[str, Any]] = []
    broken: list[str] = []
    with room_or_sentence(partial(_out_of_memory, settings, output)):
        for run in runs:
            crew = team.present()
            quiet = output.quiet or not crew.leads
            with shown_progress({run.label: 1.0}, Console(stderr=True), quiet=quiet) as display:
                result = runner.evaluate(
                    run.checkpoint,
                    run.corpus,
                    run.settings,
                    output=output.directory / run.name,
                    resume=output.resume,
                    overwrite=output.overwrite,
                    progress=partial(display, run.label),
                )
            result["bounds"], sentences = bounds.check(result, limits.max_delta_nll, limits.max_ppl_ratio)
            if model is None:
                kept, sentence = showcase.verdict(result)
                sentences = [] if kept else [sentence]
                if kept and not quiet:  # the table comes at the end
                    tell(Console(stderr=True), sentence)
            broken += sentences
            reports.append(result)
            if not crew.leads:
                continue
            runner.write_json(output.directory / run.name / runner.REPORT, result)
            if (output.verbose or model is not None) and not output.quiet:
                console.print(report.terminal_table(result, output.verbose))
    crew = team.present()
    team.leave()
    if not crew.leads:
        return [], []
    if model is None and not output.quiet:
        console.print(showcase.table(reports))
    write_atomically(output.directory / "report.md", report.markdown(reports))
    tell(console, f"reports: {output.directory}")
    return reports, broken


def _runs(model: str, text: Text, settings: Settings, loading: Loading, output: Output) -> Iterator[Run]:
    import torch

    from adaattn_hf.eval import corpora, tasks, team
    from adaattn_hf.eval.runner import Run
    from adaattn_hf.patches.checkpoint import load, read_config

    read_config(model, **loading.source())  # a wrong name is told before text is looked for
    texts = [corpora.load(s, split=text.split, separator=text.document_separator) for s in text.data or ("wikitext",)]
    if len({c.name for c in texts}) < len(texts):
        raise UsageError(
            f"data: got {', '.join(c.name for c in texts)}, expected different names: each has a directory"
        )
    for corpus in texts:
        tasks.check(corpus, settings)
    crew, device_index = team.join()
    if crew.size > 1 and loading.device in (None, "cuda") and torch.cuda.is_available():
        loading = replace(loading, device=f"cuda:{device_index}")
    rolls = settings.windows == "rolling" and any(corpus.kind != "lastword" for corpus in texts)
    plans = [plan for _, name, plan, _ in settings.arms if name.startswith("adaattn")]
    checkpoint = load(model, **asdict(loading), plans=plans, prefixed=rolls and settings.prefix_token is None)
    for corpus in texts:
        yield Run(f"{checkpoint.name} on {corpus.name}", checkpoint, corpus, settings, corpus.name)


def _out_of_memory(settings: Settings, output: Output, said: str) -> str:
    fits = [f"fewer windows at once (--batch-size {settings.batch_size // 2})"] * (settings.batch_size > 1)
    fits.append("shorter windows (--context)" if settings.context is None else f"--context {settings.context // 2}")
    return (
        f"memory: none is left ({said}), expected room for the weights and a batch; what would fit: {', '.join(fits)}, "
        "or another --dtype or --device; finished batches are kept: with the same settings --resume --output-dir "
        f"{output.directory} goes on with them, other settings need another --output-dir"
    )
