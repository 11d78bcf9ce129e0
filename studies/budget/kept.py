"""The plans of a study's page, as files: `python -m studies.budget.kept PAGE.json MODEL DIRECTORY --seed 0`.

A page keeps what was chosen for every head and how it was proved, which is all that a plan of windows and bfloat16
products holds. `adaattn eval --plan DIRECTORY/seed-000-0.001000` then measures on other text what the page proved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from adaattn_hf.errors import UsageError

from . import study
from .speed import plan_of_record

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def kept(
    page: Annotated[Path, typer.Argument(help="JSON of a study, such as docs/results/budget.json.")],
    model: study.Model,
    directory: Annotated[Path, typer.Argument(help="Where the plans go, one directory each.")],
    seed: Annotated[int, typer.Option(help="Seed whose plans are written.")] = 0,
    gguf_file: study.Gguf = None,
) -> None:
    """Write the plans of one seed that met their budgets."""
    from adaattn_hf._files import write_atomically

    records = [
        one
        for one in json.loads(page.read_text(encoding="utf-8"))["seeds"]
        if one["seed"] == seed and one["met"]
    ]
    if not records:
        raise UsageError(f"seed: got {seed}, expected one of {page} that met a budget")
    loaded, _ = study.load(model, records[0]["settings"]["dtype"], "cpu", gguf_file, None)
    for record in records:
        target = directory / f"seed-{seed:03d}-{record['budget']:.6f}" / "adaattn_plan.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, plan_of_record(record, loaded).to_json().encode())
        typer.echo(f"{record['sentence']}: {target}")


if __name__ == "__main__":
    study.run_app(app, "kept", None)
