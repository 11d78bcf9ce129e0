"""What a loss budget buys on a masked-language model, in four steps that leave their files in one directory.

`python -m studies.budget.masked prices --output DIR`, then `seeds`, `speed` and `report`. Without a
model: the packaged BERT at its full context, calibrated on the packaged calibration pages and verified on the
held-out pages, documents that no gradient and no choice of a checkpoint has seen. A seed and budget whose file
is there is not measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from adaattn_hf.errors import UsageError
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.plans import store

from . import study
from .masked_report import markdown, merge
from .masked_steps import budget_record, curve_record, material, speed_record

if TYPE_CHECKING:
    from adaattn_hf.calibration.measure import Measurement

BATCH = 8
"""Sequences of a timed pass."""
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Study = Annotated[Path, typer.Option(help="Directory of the study's files.")]
Model = Annotated[
    str | None, typer.Option(help="Hub id or directory of a masked LM. Default: the packaged BERT.")
]
Data = Annotated[list[Path] | None, typer.Option(help="Calibration text. Default: the packaged pages.")]
Held = Annotated[list[Path] | None, typer.Option(help="Held-out text. Default: the packaged pages.")]
Lengths = Annotated[str | None, typer.Option(help="Length bins. Default: the model's positions.")]
Maskings = Annotated[int, typer.Option(help="Readings of each sequence.")]
FAMILIES = "window,rank,bf16,int8"


@app.command()
def prices(
    output: Study,
    model: Model = None,
    data: Data = None,
    lengths: Lengths = None,
    families: study.Families = FAMILIES,
    dtype: study.Dtype = "float32",
    threads: study.Threads = 1,
) -> None:
    """Time the launches of every choice on this machine."""
    from adaattn_hf._files import write_atomically
    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.layers import observe_layers
    from adaattn_hf.calibration.measure import price_table
    from adaattn_hf.calibration.settings import CalibrationSettings

    given = material(output, model, data, None, lengths, dtype, threads, maskings=1)
    settings = CalibrationSettings(
        lengths=given.lengths, sequences=1, joint=1, held_out=2, tries=1, families=tuple(families.split(",")),
    )  # fmt: skip
    loaded = given.loaded
    inputs = open_inputs(loaded.model, loaded.encode, given.data, settings, scoring=loaded.scoring)
    layers = observe_layers(inputs)
    write_atomically(output / "prices.json", price_table(inputs, layers).to_json().encode())
    typer.echo(f"prices of {len(layers.candidates.choices)} choices: {output / 'prices.json'}")


@app.command()
def seeds(
    output: Study,
    model: Model = None,
    data: Data = None,
    verify_data: Held = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0-9.")] = "0-9",
    budgets: Annotated[str, typer.Option(help="Budgets by commas.")] = "0.1%,1%",
    lengths: Lengths = None,
    sequences: Annotated[int, typer.Option(help="Sequences that risks are measured on.")] = 8,
    rows: study.Rows = 256,
    labels: study.Labels = 2,
    joint: Annotated[int, typer.Option(help="Sequences that re-scale the risks.")] = 8,
    held_out: study.HeldOut = 32,
    maskings: Maskings = 6,
    families: study.Families = FAMILIES,
    dtype: study.Dtype = "float32",
    threads: study.Threads = 1,
) -> None:
    """Calibrate once per seed, choose and verify under each budget; set plans of the first beside uniform choices."""
    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.measure import measure
    from adaattn_hf.calibration.settings import CalibrationSettings
    from adaattn_hf.cli.options import nats
    from adaattn_hf.policy.prices import PriceTable

    given = material(output, model, data, verify_data, lengths, dtype, threads, maskings)
    loaded = given.loaded
    table = PriceTable.from_json((output / "prices.json").read_text(encoding="utf-8"))
    numbers = study.numbers(seeds)
    drawn: Measurement | None = None
    for seed in numbers:
        settings = CalibrationSettings(
            lengths=given.lengths, seed=seed, sequences=sequences, rows=rows, labels=labels, joint=joint,
            held_out=held_out, families=tuple(families.split(",")),
        )  # fmt: skip
        wanted = {part: replace(settings, budget=nats(part)) for part in budgets.split(",")}
        words = {
            name: study.described(one, loaded.model, given.data, given.held)
            | {"scoring": loaded.scoring.words()}
            for name, one in wanted.items()
        }
        paths = {name: output / f"seed-{seed:03d}-{one.budget:.6f}.json" for name, one in wanted.items()}
        first = seed == numbers[0] and not (output / "curve.json").is_file()
        missing = [name for name in wanted if not study.done(paths[name], words[name])]
        if not missing and not first:
            continue
        inputs = open_inputs(
            loaded.model, loaded.encode, given.data, settings, verify_data=given.held, scoring=loaded.scoring
        )
        measurement = measure(inputs, prices=table)
        for name in missing:
            record = budget_record(
                measurement, words[name], wanted[name], output / "plans" / name if first else None
            )
            study.write(paths[name], record)
            typer.echo(f"seed {seed}, {name}: {record['sentence']}")
        if first:
            drawn = measurement
    if drawn is not None:  # last, as it takes longer than a seed
        study.write(output / "curve.json", curve_record(drawn))


@app.command()
def speed(
    output: Study,
    model: Model = None,
    data: Data = None,
    lengths: Lengths = None,
    rounds: Annotated[int, typer.Option(help="Rounds over the arms; the smallest time counts.")] = 15,
    dtype: study.Dtype = "float32",
    threads: study.Threads = 1,
) -> None:
    """Time attention and the whole model under the plans of the first seed, beside stock and exact attention."""
    from adaattn_hf.calibration import corpus

    given = material(output, model, data, None, lengths, dtype, threads, maskings=1)
    loaded, length = given.loaded, given.lengths[-1]
    found = sorted((output / "plans").iterdir()) if (output / "plans").is_dir() else []
    if not found:
        raise UsageError(f"output: {output} has no plans; make them with the step seeds")
    plans = {directory.name: store.read_plan(directory) for directory in found}
    for directory in found:
        store.read_tensors(plans[directory.name], directory)
    text = corpus.draw(given.data, loaded.encode, loaded.scoring.content(length), {"text": BATCH}, 0)
    tokens = torch.cat(
        [loaded.scoring.readings(one.tokens, 0, torch.device("cpu"))[0].tokens for one in text.parts["text"]]
    )
    record = speed_record(loaded.model, plans, tokens, rounds)
    study.write(output / "speed.json", record | {"provenance": provenance(torch.device("cpu"))})
    for level in ("attention", "model"):
        typer.echo(f"{level}: " + ", ".join(f"{name} {value:.3f} s" for name, value in record[level].items()))


@app.command()
def report(
    output: Study,
    target: Annotated[Path, typer.Argument(help="The JSON; its page is written beside it.")],
) -> None:
    """Merge the files of a study into one JSON, and write its page."""
    from adaattn_hf._files import write_atomically

    record = merge(output)
    study.write(target, record)
    write_atomically(target.with_suffix(".md"), markdown(record).encode())
    typer.echo(f"{target}, {target.with_suffix('.md')}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    study.run_app(app, "masked", argv)


if __name__ == "__main__":
    main()
