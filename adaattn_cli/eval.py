"""`adaattn eval`: compares the perplexity of two attention implementations on real text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adaattn_hf._files import write_atomically
from adaattn_hf.errors import UsageError
from adaattn_hf.eval import corpora, report, runner, showcase, tasks, team
from adaattn_hf.eval.progress import shown_progress, tell
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches.checkpoint import load, read_config, resolve_device

from .ending import ending, room_or_sentence, use_threads, writable
from .on_text import Eval
from .options import Done

OF_A_MODEL = {
    "data", "split", "document_separator", "plan", "baseline_plan", "revision", "gguf_file", "trust_remote_code",
    "tokenizer", "objective", "max_ppl_ratio",
}  # fmt: skip
"""Options that say nothing of the models in the package."""


def run(options: Eval) -> Done:
    """Measures, and returns the reports; code 1 if a bound is broken."""
    directory = options.directory
    with ending(
        default=directory,
        stays="finished batches are kept, and --resume goes on with them",
        kept=lambda: (
            f"finished work is kept in {directory}; the same command with --resume --output-dir {directory} goes on"
        ),
    ):
        use_threads(options.threads)
        reports, broken = _measured(options, Console(stderr=options.as_json))
    for sentence in broken:
        tell(Console(stderr=True, style="red"), f"quality: {sentence}")
    return Done((reports[0] if len(reports) == 1 else reports) if reports else None, int(bool(broken)))


def _measured(options: Eval, console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    settings, directory = options.fill(Settings), options.directory
    resolve_device(options.device)
    writable(directory, "output_dir")
    if options.model is None:
        for field in fields(options):
            if field.name in OF_A_MODEL and (value := getattr(options, field.name)) != field.default:
                raise UsageError(
                    f"{field.name}: got {value!r} without MODEL; the models in the package have their own text. "
                    "Name a model first: adaattn eval MODEL --data …"
                )
        team.join()
        runs = showcase.runs(settings, options.dtype, options.device)
    else:
        read_config(options.model, **options.source())  # a wrong name is told before text is looked for
        runs = _runs(options, settings)
    reports: list[dict[str, Any]] = []
    broken: list[str] = []
    with room_or_sentence(partial(_out_of_memory, settings, directory)):
        for one in runs:
            crew = team.present()
            quiet = options.quiet or not crew.leads
            with shown_progress({one.label: 1.0}, Console(stderr=True), quiet=quiet) as display:
                result = runner.evaluate(
                    one.checkpoint,
                    one.corpus,
                    one.settings,
                    output=directory / one.name,
                    resume=options.resume,
                    overwrite=options.overwrite,
                    progress=partial(display, one.label),
                )
            asked = result["bounds"] = report.bounds(result, options.max_ppl_ratio)
            sentences = [f"{one.label}: {b['name']} {b['asked']:g}: {b['sentence']}" for b in asked if not b["kept"]]
            if options.model is None:
                kept, sentence = showcase.verdict(result)
                sentences = [] if kept else [sentence]
                if kept and not quiet:  # the table comes at the end
                    tell(Console(stderr=True), sentence)
            broken += sentences
            reports.append(result)
            if not crew.leads:
                continue
            runner.write_json(directory / one.name / runner.REPORT, result)
            if (options.verbose or options.model is not None) and not options.quiet:
                console.print(report.terminal_table(result, options.verbose))
    crew = team.present()
    team.leave()
    if not crew.leads:
        return [], []
    if options.model is None and not options.quiet:
        console.print(showcase.table(reports))
    write_atomically(directory / "report.md", report.markdown(reports))
    tell(console, f"reports: {directory}")
    return reports, broken


def _runs(options: Eval, settings: Settings) -> Iterator[runner.Run]:
    texts = [
        corpora.load(spec, split=options.split, separator=options.document_separator)
        for spec in options.data or ("wikitext",)
    ]
    if len({c.name for c in texts}) < len(texts):
        raise UsageError(
            f"data: got {', '.join(c.name for c in texts)}, expected different names: each has a directory"
        )
    for corpus in texts:
        tasks.check(corpus, settings)
    (crew, device_index), loading = team.join(), options.loading()
    if crew.size > 1 and options.device in (None, "cuda") and torch.cuda.is_available():
        loading["device"] = f"cuda:{device_index}"
    rolls = settings.windows == "rolling" and any(corpus.kind != "lastword" for corpus in texts)
    plans = [plan for _, name, plan, _ in settings.arms if name.startswith("adaattn")]
    checkpoint = load(str(options.model), **loading, plans=plans, prefixed=rolls and settings.prefix_token is None)
    for corpus in texts:
        yield runner.Run(f"{checkpoint.name} on {corpus.name}", checkpoint, corpus, settings, corpus.name)


def _out_of_memory(settings: Settings, directory: Path, said: str) -> str:
    fits = [f"fewer windows at once (--batch-size {settings.batch_size // 2})"] * (settings.batch_size > 1)
    fits.append("shorter windows (--context)" if settings.context is None else f"--context {settings.context // 2}")
    return (
        f"memory: none is left ({said}), expected room for the weights and a batch; what would fit: {', '.join(fits)}, "
        "or another --dtype or --device; finished batches are kept: with the same settings --resume --output-dir "
        f"{directory} goes on with them, other settings need another --output-dir"
    )
