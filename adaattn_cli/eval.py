"""`adaattn eval`: compares the perplexity of two attention implementations on real text."""

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from adaattn_hf._files import write_atomically
from adaattn_hf.errors import UsageError
from adaattn_hf.eval import corpora, report, runner, showcase, tasks, team
from adaattn_hf.eval.progress import shown_progress, tell
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches.checkpoint import load, read_config, resolve_device

from .commands import EVAL
from .ending import ending, room_or_sentence, use_threads, writable
from .options import Done, Options

OF_A_MODEL = {
    "data", "split", "plan", "baseline_plan", "revision", "gguf_file", "trust_remote_code",
    "tokenizer", "objective", "max_ppl_ratio",
}  # fmt: skip
"""Options that say nothing of the models in the package."""


def run(options: Options) -> Done:
    """Measures, and returns the reports; code 1 if a bound is broken."""
    directory = options.output_dir or Path("results", "eval", f"{datetime.now(UTC):%Y%m%d-%H%M%S}")
    goes_on = f"--resume --output-dir {directory} goes on"
    kept = f"finished work is kept in {directory}; the same command with {goes_on}"
    with ending(default=directory, kept=lambda: kept):
        use_threads(options.threads)
        settings = options.fill(Settings)
        resolve_device(options.device)
        writable(directory, "output_dir")

        def no_room(error: str) -> str:
            fits = [f"fewer windows at once (--batch-size {settings.batch_size // 2})"] * (settings.batch_size > 1)
            shorter = settings.context and f"--context {settings.context // 2}"
            fits.append(shorter or "shorter windows (--context)")
            return (
                f"memory: none is left ({error}), expected room for the weights and a batch; what would fit: "
                f"{', '.join(fits)}, or another --dtype or --device; finished batches are kept: with the same settings "
                f"{goes_on} with them, other settings need another --output-dir"
            )

        with room_or_sentence(no_room):
            reports, broken = _measured(options, settings, directory)
    tell(Console(stderr=True, style="red"), *(f"quality: {sentence}" for sentence in broken))
    return Done((reports[0] if len(reports) == 1 else reports) if reports else None, int(bool(broken)))


def _measured(options: Options, settings: Settings, directory: Path) -> tuple[list[dict[str, Any]], list[str]]:
    console, packaged = Console(stderr=options.as_json), options.model is None
    if packaged:
        for name, one in EVAL.options.items():
            if name in OF_A_MODEL and (value := getattr(options, name)) != one.default:
                raise UsageError(
                    f"{name}: got {value!r} without MODEL; the models in the package have their own text. "
                    "Name a model first: adaattn eval MODEL --data …"
                )
    else:
        corpora.refuse_missing(options.data)
        read_config(options.model, **options.source())  # a wrong name is told before text is looked for on the Hub
    group = team.join()
    runs = showcase.runs(settings, options.dtype, options.device)
    if not packaged:
        runs = _runs(options, settings, group.device(options.device))
    reports: list[dict[str, Any]] = []
    broken: list[str] = []
    for label, checkpoint, corpus, chosen, name in runs:
        place = directory / name
        with shown_progress(Console(stderr=True), quiet=options.quiet or not group.is_main) as display:
            result = runner.evaluate(
                checkpoint, corpus, chosen, output=place, resume=options.resume, progress=partial(display, label)
            )
        bounds = result["bounds"] = report.bounds(result, options.max_ppl_ratio)
        broken += [f"{label}: {b['name']} {b['asked']:g}: {b['sentence']}" for b in bounds if not b["kept"]]
        if packaged:
            kept, sentence = showcase.verdict(result)
            if not kept:
                broken.append(sentence)
            elif group.is_main and not options.quiet:  # the table comes at the end
                tell(Console(stderr=True), sentence)
        reports.append(result)
        if group.is_main:
            runner.write_json(place / runner.REPORT, result)
            if (options.verbose or not packaged) and not options.quiet:
                console.print(report.terminal_table(result, options.verbose))
    team.leave()
    if not group.is_main:
        return [], []
    if packaged and not options.quiet:
        console.print(showcase.table(reports))
    write_atomically(directory / "report.md", report.markdown(reports))
    tell(console, f"reports: {directory}")
    return reports, broken


def _runs(options: Options, settings: Settings, device: str | None) -> Iterator[runner.Run]:
    specs = options.data or ("wikitext",)
    texts = [corpora.load(spec, split=options.split) for spec in specs]
    names = [corpus.name for corpus in texts]
    if len({*names}) < len(names):
        raise UsageError(f"data: got {', '.join(names)}, expected different names: each has a directory")
    for corpus in texts:
        tasks.check(corpus, settings)
    rolls = settings.windows == "rolling" and any(corpus.kind != "lastword" for corpus in texts)
    plans = [plan for _, name, plan, _ in settings.arms if name.startswith("adaattn")]
    loading = options.loading() | {"device": device}
    checkpoint = load(str(options.model), **loading, plans=plans, prefixed=rolls and settings.prefix_token is None)
    for corpus in texts:
        yield f"{checkpoint.name} on {corpus.name}", checkpoint, corpus, settings, corpus.name
