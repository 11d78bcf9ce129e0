"""Loss against speed: plans of rising budgets and uniform choices, `python -m adaattn_hf.eval.budget.curve …`.

One calibration of the risks, then plans for a row of budgets, with all choices and with those of one kind
alone, and the same choice for every head beside them. Budgets are the sums of risks that a plan may take at
each length, not re-scaled; every plan is measured on the same held-out text. A plan that is in the file
already is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from adaattn_hf.eval.ablate import ARMS, only
from adaattn_hf.eval.budget import study
from adaattn_hf.eval.provenance import provenance

BUDGETS = "1e-4,2e-4,4e-4,7e-4,1e-3,2e-3,4e-3,7e-3,1e-2,3e-2"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def curve_of(
    run: Any, budgets: Sequence[float], arms: Sequence[str], target: Path, words: dict[str, Any]
) -> None:
    """Measures every plan of the curve, writing the file after each.

    Args:
        run: A `calibrate.Run`, measured and priced.
        budgets: Sums of risks in nats/token.
        arms: Some of `ablate.ARMS`.
        target: The file.
        words: What it belongs to; see `study.described`.
    """
    import numpy as np

    record: dict[str, Any] = {"curve": [], "uniform": []}
    if study.done(target, words):
        record = json.loads(target.read_text(encoding="utf-8"))
    record |= {"settings": words, "prices": run.table.digest, "provenance": provenance(run.arms.device)}
    lengths = run.settings.lengths
    choices = run.candidates.choices
    units = np.arange(len(run.units))

    def entry(picks: Any) -> dict[str, Any]:
        risks = run.risks()[:, units, picks].sum(axis=1)
        return {
            "predicted": risks.tolist(),
            "picks": [choices[pick].label for pick in picks],
            "test": {str(length): run.measured(picks, length) for length in lengths},
        }

    known = {(one["family"], one["budget"]) for one in record["curve"]}
    for arm in arms:
        for budget in budgets:
            if (arm, budget) not in known:
                picks = run.solve(np.full(len(lengths), budget), allowed=only(arm)).picks
                record["curve"].append({"family": arm, "budget": budget, **entry(picks)})
                study.write(target, record)
    known = {one["choice"] for one in record["uniform"]}
    for place, choice in enumerate(choices[1:], start=1):
        if choice.label not in known:
            record["uniform"].append({"choice": choice.label, **entry(np.full(len(units), place))})
            study.write(target, record)


@app.command()
def curve(
    model: study.Model,
    data: study.Data,
    prices: study.Prices,
    output: Annotated[Path, typer.Option(help="The file of the curve.")],
    verify_data: study.Held = None,
    budgets: Annotated[str, typer.Option(help="Budgets in nats/token, by commas.")] = BUDGETS,
    arms: Annotated[str, typer.Option(help="Kinds of plans, by commas.")] = ",".join(ARMS),
    lengths: study.Lengths = "4096,8192",
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    sequences: Annotated[int, typer.Option(help="Sequences per length that risks are measured on.")] = 6,
    rows: study.Rows = 256,
    labels: study.Labels = 4,
    held_out: study.HeldOut = 12,
    families: study.Families = study.FAMILIES,
    masses: study.Masses = study.MASSES,
    dtype: study.Dtype = "float32",
    device: study.Device = "cpu",
    threads: study.Threads = None,
    gguf_file: study.Gguf = None,
) -> None:
    """Measure loss against speed for plans of rising budgets and for uniform choices."""
    from adaattn_hf.calibration.calibrate import CalibrationSettings, prepare_run
    from adaattn_hf.policy.prices import PriceTable

    loaded, encode = study.load(model, dtype, device, gguf_file, threads)
    table = PriceTable.from_json(prices.read_text(encoding="utf-8"))
    settings = CalibrationSettings(
        lengths=tuple(study.numbers(lengths)), seed=seed, sequences=sequences, rows=rows, labels=labels, joint=1,
        held_out=held_out, tries=1, haystacks=0, families=tuple(families.split(",")),
        masses=study.shares(masses),
    )  # fmt: skip
    run = prepare_run(loaded, encode, data, settings, verify_data, table)
    words = study.described(settings, loaded, data, verify_data)
    curve_of(run, [float(part) for part in budgets.split(",")], arms.split(","), output, words)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    study.run_app(app, "curve", argv)


if __name__ == "__main__":
    main()
