"""Loss against speed: plans of rising budgets and uniform choices, `python -m studies.budget.curve …`.

One calibration of the risks, then plans for a row of budgets, with all choices and with those of one kind
alone, and the same choice for every head beside them. Budgets are the sums of risks that a plan may take at
each length, not re-scaled; every plan is measured on the same held-out text, and on other sequences of the
text that risks were measured on. A plan that is in the file already is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaattn_hf.errors import UsageError
from adaattn_hf.eval.provenance import provenance

from . import study
from .ablate import ARMS, only

if TYPE_CHECKING:
    from adaattn_hf.calibration.measure import Measurement

BUDGETS = "1e-4,2e-4,4e-4,7e-4,1e-3,2e-3,4e-3,7e-3,1e-2,3e-2"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def curve_of(
    measurement: Measurement,
    budgets: Sequence[float],
    arms: Sequence[str],
    target: Path,
    words: dict[str, Any],
    uniform: str = "all",
) -> None:
    """Measures every plan of the curve, writing the file after each.

    Args:
        measurement: Risks and prices of the model.
        budgets: Sums of risks in nats/token.
        arms: Some of `ablate.ARMS`.
        target: The file.
        words: What it belongs to; see `study.described`.
        uniform: Labels of the choices that every head takes at once, by commas; `all`, or `none`.

    Raises:
        UsageError: If an arm or a choice is unknown.
    """
    import numpy as np

    from adaattn_hf.calibration.search import solve

    from .held_out import HeldOutPasses

    settings, candidates = measurement.inputs.settings, measurement.layers.candidates.choices
    passes = HeldOutPasses(measurement)
    for arm in arms:
        if arm not in ARMS:
            raise UsageError(f"arms: got {arm!r}, expected some of {', '.join(ARMS)}")
    labels = [choice.label for choice in candidates]
    everywhere = {"all": labels[1:], "none": []}.get(uniform, uniform.split(","))
    for label in everywhere:
        if label not in labels[1:]:
            raise UsageError(
                f"uniform: got {label!r}, expected all, none, or some of {', '.join(labels[1:])}"
            )
    record: dict[str, Any] = {"curve": [], "uniform": []}
    if study.done(target, words):
        record = json.loads(target.read_text(encoding="utf-8"))
    record |= {
        "settings": words,
        "prices": measurement.table.digest,
        "provenance": provenance(measurement.inputs.arms.device),
    }
    lengths = settings.lengths
    units = np.arange(len(measurement.layers.units))

    def entry(picks: Any) -> dict[str, Any]:
        risks = measurement.risks()[:, units, picks].sum(axis=1)
        return {
            "predicted": risks.tolist(),
            "picks": [labels[pick] for pick in picks],
            "same_source": {str(length): passes.joint(picks, length).kl for length in lengths},
            "test": {str(length): passes.held_out(picks, length) for length in lengths},
        }

    def chosen(arm: str, budget: float) -> Any:
        return solve(measurement, np.full(len(lengths), budget), allowed=only(arm)).picks

    known = {(one["family"], one["budget"]) for one in record["curve"]}
    for arm in arms:
        for budget in budgets:
            if (arm, budget) not in known:
                record["curve"].append({"family": arm, "budget": budget, **entry(chosen(arm, budget))})
                study.write(target, record)
    measured = {one["choice"] for one in record["uniform"]}
    for label in everywhere:
        if label not in measured:
            record["uniform"].append({"choice": label, **entry(np.full(len(units), labels.index(label)))})
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
    joint: Annotated[
        int, typer.Option(help="Other sequences of the same text that plans are measured on.")
    ] = 3,
    uniform: Annotated[
        str, typer.Option(help="Choices for every head at once, by commas; all, or none.")
    ] = "all",
    state: Annotated[
        Path | None, typer.Option(help="Directory where the calibration is kept, and gone on with.")
    ] = None,
    held_out: study.HeldOut = 12,
    families: study.Families = study.FAMILIES,
    dtype: study.Dtype = "float32",
    device: study.Device = "cpu",
    threads: study.Threads = None,
    gguf_file: study.Gguf = None,
) -> None:
    """Measure loss against speed for plans of rising budgets and for uniform choices."""
    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.measure import measure
    from adaattn_hf.calibration.settings import CalibrationSettings
    from adaattn_hf.policy.prices import PriceTable

    loaded, encode = study.load(model, dtype, device, gguf_file, threads)
    table = PriceTable.from_json(prices.read_text(encoding="utf-8"))
    settings = CalibrationSettings(
        lengths=tuple(study.numbers(lengths)), seed=seed, sequences=sequences, rows=rows, labels=labels, joint=joint,
        held_out=held_out, tries=1, haystacks=0, families=tuple(families.split(",")),
    )  # fmt: skip
    inputs = open_inputs(loaded, encode, data, settings, verify_data=verify_data)
    measurement = measure(inputs, prices=table, directory=state, resume=True)
    words = study.described(settings, loaded, data, verify_data)
    curve_of(
        measurement, [float(part) for part in budgets.split(",")], arms.split(","), output, words, uniform
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    study.run_app(app, "curve", argv)


if __name__ == "__main__":
    main()
