"""The proof of a plan once more, by this machine's kernels: `python -m studies.budget.replay MODEL --record …`.

A seed's record says which held-out sequences verified its plan. They are drawn again, and the plan's loss on
each is measured here: through the native kernels where the record was made by torch operations, on a processor
where it was made on a GPU. Mean keys are computed anew, from the same calibration text. Every sequence is kept
as it is measured, so that an interrupted run goes on, and `--limit` stops between two of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from adaattn_hf.errors import UsageError
from adaattn_hf.eval.provenance import provenance

from . import study
from .speed import plan_of_record

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SCORES = ("kl", "delta_nll", "top1", "tokens")


def settings_of(record: Mapping[str, Any]) -> Any:
    """Returns the settings that a record was made with."""
    from adaattn_hf.calibration.settings import CalibrationSettings

    known = {field.name for field in fields(CalibrationSettings)}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in record["settings"].items()
        if name in known
    }
    return CalibrationSettings(**given)


def scored(arms: Any, programs: Mapping[str, Any], sequence: Any) -> dict[str, dict[str, float]]:
    """Returns the sums over the tokens of one sequence under each plan, exact attention computed once.

    Args:
        arms: The model.
        programs: By plan, its programs by layer index.
        sequence: The sequence.
    """
    from adaattn_hf.calibration.arms import compare, plan_tap

    tokens = torch.tensor([sequence.tokens], device=arms.device)
    exact = arms.exact(tokens)
    found = {}
    for name, program in programs.items():
        scores = compare(arms, tokens, plan_tap(program), exact)
        found[name] = {
            "kl": float(scores.kl.sum()),
            "delta_nll": float(scores.delta.sum()),
            "top1": float(scores.agree.sum()),
            "tokens": scores.kl.shape[1],
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
    length: Annotated[int, typer.Option(help="Length bin that is measured.")] = 4096,
    limit: Annotated[float, typer.Option(help="Seconds after which no further sequence is begun.")] = float(
        "inf"
    ),
    dtype: study.Dtype = "float32",
    device: study.Device = "cpu",
    threads: study.Threads = None,
    gguf_file: study.Gguf = None,
) -> None:
    """Measure the loss of recorded plans again, on the same held-out sequences, with this machine's kernels.

    Exit code 3: the limit came first; run the same command again.
    """
    from adaattn_hf.calibration.arms import programs_of
    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.layers import observe_layers

    begin = time.perf_counter()
    loaded, encode = study.load(model, dtype, device, gguf_file, threads)
    records = {}
    for one in record:
        name, _, path = one.partition("=")
        records[name] = json.loads(Path(path).read_text(encoding="utf-8"))
    first = next(iter(records.values()))
    for name, one in records.items():
        if one["seed"] != first["seed"]:
            raise UsageError(
                f"record: {name} is of seed {one['seed']}, expected that of the first, {first['seed']}"
            )
    words = {"seed": first["seed"], "length": length, "plans": {n: r["prices"] for n, r in records.items()}}
    verdicts = {name: recorded(one, length) for name, one in records.items()}
    shard = shard_of(first, length)
    for name, one in records.items():
        if shard_of(one, length) != shard:
            raise UsageError(
                f"record: {name} was proved on other sequences than the first; replay them apart"
            )
    kept: dict[str, Any] = {"settings": words, "sequences": []}
    if study.done(output, words):
        kept = json.loads(output.read_text(encoding="utf-8"))
    kept |= {
        "recorded": verdicts,
        "recorded_on": first["provenance"],
        "provenance": provenance(torch.device(device)),
    }
    held: list[str | Path] | None = list(verify_data) if verify_data else None
    settings = replace(settings_of(first), lengths=(length,))
    inputs = open_inputs(loaded, encode, data, settings, verify_data=held)
    tensors = observe_layers(inputs).tensors
    programs = {name: programs_of(plan_of_record(one, loaded), tensors) for name, one in records.items()}
    sequences = inputs.samples[length].held_out[shard]
    while len(kept["sequences"]) < len(sequences):
        if time.perf_counter() - begin > limit:
            typer.echo(f"stopped: {limit:g} seconds are over; run the same command again")
            raise typer.Exit(3)
        kept["sequences"].append(scored(inputs.arms, programs, sequences[len(kept["sequences"])]))
        study.write(output, kept)
        typer.echo(f"sequence {len(kept['sequences'])} of {len(sequences)}: {kept['sequences'][-1]}")


def shard_of(record: Mapping[str, Any], length: int) -> slice:
    """Returns which of the held-out sequences of a length the plan of a record was proved on.

    Records of versions that looked once, at as many sequences for each try, do not name them.
    """
    verified = [entry for entry in record["report"]["history"] if "verified" in entry]
    if "held_out" in verified[-1]:
        return slice(*verified[-1]["held_out"][str(length)])
    each = record["settings"]["held_out"]
    return slice((len(verified) - 1) * each, len(verified) * each)


def recorded(record: Mapping[str, Any], length: int) -> dict[str, float]:
    """Returns what a record's verdict says of a length.

    Raises:
        UsageError: If the plan did not meet its budget, or was made for other lengths.
    """
    lengths = record["settings"]["lengths"]
    if not record["met"] or length not in lengths:
        raise UsageError(
            f"record: a plan of {lengths} tokens, met: {record['met']}; expected one that met its budget, for {length} "
            "tokens"
        )
    verdict = record["report"]["verdicts"][lengths.index(length)]
    return {name: verdict[name] for name in SCORES}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    study.run_app(app, "replay", argv)


if __name__ == "__main__":
    main()
