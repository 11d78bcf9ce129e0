"""Measure on a CUDA device, and write the page: `python -m studies.cuda run dense plans --out DIR`, then `page`.

Sections are independent: one process each (with CUDA_VISIBLE_DEVICES) or one after the other. Each keeps every cell in
`DIR/SECTION.json` as it is found, and goes on from there when it is called again with the same setting.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from .measure import Section, peaks, setting
from .page import joined, write

# The module and function of a section, and its title on the page.
SECTIONS = {
    "dense": ("kernels", "dense", "Exact causal attention"),
    "structures": ("kernels", "structures", "Masks"),
    "prefill": ("kernels", "prefill", "Windows per head, prefill"),
    "decode": ("kernels", "decode", "Windows per head, one decode step"),
    "training": ("kernels", "training", "Forward and backward at 16k"),
}
RECORDS = {
    "growing": "Decode steps, each with a new number of keys",
    "packed": "Packed and padded calls compared with dense ones",
    "stored": "One decode step on a quantised cache",
    "light": "Short and middling causal calls",
    "compiled": "Whole models under torch.compile",
    "generation": "Generation with a static cache",
    "model": "A model shaped like LLaMA-8B, 32 layers, random weights",
    "eight": "Scores in int8 (record)",
}
"""Sections of the page whose programs are no longer here."""
TITLES = {name: title for name, (_, _, title) in SECTIONS.items()} | RECORDS
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    sections: Annotated[list[str], typer.Argument(help="Sections, in this order; `all` for every one.")],
    out: Annotated[Path, typer.Option(help="Directory of the sections' files.")],
) -> None:
    """Measure sections."""
    names = list(SECTIONS) if sections == ["all"] else sections
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        raise typer.BadParameter(f"sections: got {unknown}, expected some of {', '.join(SECTIONS)}")
    out.mkdir(parents=True, exist_ok=True)
    facts, reached = setting(), peaks()
    sys.stdout.write(f"{facts}\n{reached}\n")
    for name in names:
        module, function, _ = SECTIONS[name]
        started = time.perf_counter()
        section = Section(out / f"{name}.json", facts, reached)
        getattr(importlib.import_module(f"{__package__}.{module}"), function)(section)
        sys.stdout.write(f"--- {name}: {time.perf_counter() - started:.0f} s\n")
        sys.stdout.flush()


@app.command()
def page(
    results: Annotated[Path, typer.Option("--from", help="Directory of the sections' files.")],
    to: Annotated[Path, typer.Option("--write", help="Directory of gpu_plans.json and gpu_plans.md.")],
) -> None:
    """Write the page of the sections that were measured; of the others what the report there says of them stays."""
    kept = to / "gpu_plans.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    write(joined(results, TITLES, before), TITLES, to)


if __name__ == "__main__":
    app()
