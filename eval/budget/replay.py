"""The proof of a plan once more, by this machine's kernels: `python -m adaattn_hf.eval.budget.replay MODEL --record …`.

A seed's record says which held-out sequences verified its plan. They are drawn again, and the plan's loss on
them is measured here, in the length bins that are asked for: through the native kernels where the record was
made by torch operations, on a processor where it was made on a GPU. Mean keys are computed anew, from the same
calibration text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from adaattn_hf.eval.budget import study
from adaattn_hf.eval.budget.speed import plan_of_record
from adaattn_hf.eval.errors import UsageError
from adaattn_hf.eval.provenance import provenance

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SCORES = ("kl", "delta_nll", "top1", "tokens")


def settings_of(record: Mapping[str, Any]) -> Any:
    """Returns the settings that a record was made with."""
    from adaattn_hf.calibration.settings import CalibrationSettings

    known = {field.name for field in fields(CalibrationSettings)}
    given = {name: value for name, value in record["settings"].items() if name in known}
    return CalibrationSettings(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )


def replayed(
    run: Any, record: Mapping[str, Any], lengths: Sequence[int], states: dict[str, dict[int, Any]]
) -> dict[str, Any]:
    """Returns by length what held-out text says here and what it said in the record.

    Args:
        run: A `calibrate.Run` of the record's settings and texts.
        record: A seed's record whose plan met its budget.
        lengths: Some of its length bins.
        states: Exact hidden states by length and shard, kept between records of one seed.
    """
    from adaattn_hf.calibration import verify
    from adaattn_hf.calibration.arms import programs_of

    programs = programs_of(plan_of_record(record, run.model), run.tensors)
    tries = sum("verified" in entry for entry in record["report"]["history"])
    found = {}
    for length in lengths:
        held = run.samples[length][0][f"try {tries}"]
        kept = states.setdefault(f"{length} {tries}", {})
        evidence = verify.gather(run.arms, programs, held, states=kept)
        bound = evidence.bound(0.95)
        verdict = record["report"]["verdicts"][record["settings"]["lengths"].index(length)]
        found[str(length)] = {
            "here": {
                "kl": float(torch.cat(evidence.kl).mean()),
                "delta_nll": bound.mean,
                "top1": evidence.agree / bound.tokens,
                "tokens": bound.tokens,
            },
            "recorded": {name: verdict[name] for name in SCORES},
        }
    return found


@app.command()
def replay(
    model: study.Model,
    record: Annotated[
        list[str], typer.Option(help="A plan to prove, NAME=FILE of `study seeds`; of one seed.")
    ],
    data: study.Data,
    output: Annotated[Path, typer.Option(help="The file of the figures.")],
    verify_data: study.Held = None,
    lengths: study.Lengths = "4096",
    dtype: study.Dtype = "float32",
    device: study.Device = "cpu",
    threads: study.Threads = None,
    gguf_file: study.Gguf = None,
) -> None:
    """Measure the loss of recorded plans again, on the same held-out sequences, with this machine's kernels."""
    from adaattn_hf.calibration.arms import silent
    from adaattn_hf.calibration.calibrate import Run

    loaded, encode = study.load(model, dtype, device, gguf_file, threads)
    records = {}
    for one in record:
        name, _, path = one.partition("=")
        records[name] = json.loads(Path(path).read_text(encoding="utf-8"))
    first = next(iter(records.values()))
    for name, one in records.items():
        if one["seed"] != first["seed"] or not one["met"]:
            raise UsageError(
                f"record: {name} must be of seed {first['seed']} like the first, and have met its budget"
            )
    held = list(verify_data) if verify_data else None
    run = Run(loaded, encode, list(data), settings_of(first), held, silent)
    states: dict[str, dict[int, Any]] = {}
    kept: dict[str, Any] = {
        "seed": first["seed"],
        "recorded_on": first["provenance"],
        "provenance": provenance(torch.device(device)),
        "plans": {},
    }
    for name, one in records.items():
        kept["plans"][name] = replayed(run, one, study.numbers(lengths), states)
        study.write(output, kept)
        typer.echo(f"{name}: {json.dumps(kept['plans'][name])}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    study.run_app(app, "replay", argv)


if __name__ == "__main__":
    main()
