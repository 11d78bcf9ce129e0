"""What a loss budget buys over many seeds: `python -m studies.budget.study prices|seeds …`.

Losses are measured on any device, CUDA included; prices on the machine whose speed is of interest, and handed
over as a file. Every seed and every budget is a file of its own, and a file that is there is not measured
again: an interrupted study goes on, and `--limit` stops between two of them. Several processes may share the seeds,
one a GPU, and write into one directory. Text of another kind (`--check-data`) is read once a plan is made: it
decides nothing and says what the plan loses there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from adaattn_hf.errors import EvalError, UsageError
from adaattn_hf.eval.provenance import provenance

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="Hub id or directory of a causal LM.")]
Data = Annotated[list[Path], typer.Option(help="Calibration text: .txt, .jsonl, or directories of them.")]
Held = Annotated[list[Path] | None, typer.Option(help="Held-out text of another source.")]
Lengths = Annotated[str, typer.Option(help="Length bins in tokens, rising, by commas.")]
Prices = Annotated[Path, typer.Option(help="Price table of `study prices`.")]
Output = Annotated[Path, typer.Option(help="Directory of the study's files.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Gguf = Annotated[str | None, typer.Option(help="GGUF file within MODEL.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of torch.")]
Families = Annotated[str, typer.Option(help="Kinds of choices, by commas.")]
Rows = Annotated[int, typer.Option(help="Query rows sampled per sequence.")]
Labels = Annotated[int, typer.Option(help="Label draws per sequence.")]
HeldOut = Annotated[int, typer.Option(help="Held-out sequences per length and try.")]
Check = Annotated[list[Path] | None, typer.Option(help="Text that plans are measured on once they are made.")]
FAMILIES = "window,bf16,int8,rank"
REMEMBERED = 12 << 30
"""Bytes of exact hidden states that a process keeps: seeds and budgets read the same stretches of text."""


def load(
    model: str, dtype: str, device: str, gguf_file: str | None, threads: int | None
) -> tuple[Any, Callable[[str], Sequence[int]]]:
    """Returns a model with `attn_implementation="adaattn"` on its device, and text to token ids."""
    from adaattn_hf.cli.options import use_threads
    from adaattn_hf.patches import checkpoint

    use_threads(threads)
    loaded = checkpoint.load(model, dtype=dtype, device="cpu", gguf_file=gguf_file, implementation="adaattn")

    # every seed reads the same pieces of the same text: they are kept, which costs the corpus in memory
    @cache
    def encode(text: str) -> tuple[int, ...]:
        return tuple(loaded.encode(text))

    return loaded.model.to(checkpoint.resolve_device(device)), encode


def remembering(arms: Any, most: int = REMEMBERED) -> Any:
    """Returns a model's arms whose exact arm remembers the hidden states of what it has read, up to `most` bytes."""
    from adaattn_hf.calibration.scoring import reading_of

    known: dict[bytes, Any] = {}
    exact, room = arms.exact, most

    def remembered(given: Any) -> Any:
        nonlocal room
        reading = reading_of(given)
        parts = (reading.tokens, reading.places)
        key = b"|".join(b"" if part is None else part.cpu().numpy().tobytes() for part in parts)
        if key in known:
            return known[key]
        states = exact(given)
        if (room := room - states.nbytes) > 0:
            known[key] = states
        return states

    arms.exact = remembered
    return arms


def numbers(text: str) -> list[int]:
    """Returns the numbers of `0-3,7`.

    Raises:
        UsageError: If it is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise UsageError(f"numbers: got {text!r}, expected numbers and ranges by commas, such as 0-3,7")
        found += range(int(first), int(last or first) + 1)
    return found


def write(path: Path, record: dict[str, Any]) -> None:
    """Writes a record of the study, whole or not at all."""
    from adaattn_hf._files import json_text, write_atomically

    write_atomically(path, json_text(record, indent=1, sort_keys=True) + "\n")


def done(path: Path, settings: dict[str, Any]) -> bool:
    """Whether a record is there, of the same settings.

    Raises:
        UsageError: If it is there with other settings.
    """
    if not path.is_file():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))["settings"]
    if found != settings:
        raise UsageError(f"output: {path} was measured with other settings; give another --output, or remove it")
    return True


def described(
    settings: Any,
    model: Any,
    data: Sequence[Path],
    verify_data: Sequence[Path] | None,
    check_data: Sequence[Path] | None = None,
    check: int = 0,
) -> dict[str, Any]:
    """Returns what a record belongs to, as JSON data: settings, model and texts by name."""
    words = {
        **asdict(settings),
        "model": Path(model.config.name_or_path).name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "data": [path.name for path in data],
        "verify_data": [path.name for path in verify_data or ()],
    }
    if check_data:
        words |= {"check_data": [path.name for path in check_data], "check": check}
    plain: dict[str, Any] = json.loads(json.dumps(words))
    return plain


def checked(measurement: Any, plan: Any, texts: Mapping[int, Sequence[Any]]) -> dict[str, dict[str, float]]:
    """Returns what text that nothing was learned from says of a plan, by length; bounds one-sided at 95 %."""
    from adaattn_hf.calibration import verify
    from adaattn_hf.calibration.arms import plan_tap, programs_of

    from .held_out import scores

    inputs, found = measurement.inputs, {}
    programs = programs_of(plan, measurement.layers.tensors)
    for length, sequences in texts.items():
        evidence = verify.gather(inputs, plan_tap(programs), sequences, verify.Evidence(), 0)
        documents, tokens = evidence.worst(0.95).clusters, sum(evidence.tokens)
        found[str(length)] = {**scores(evidence), "documents": documents, "tokens": tokens}
    return found


def seed_study(
    model: Any,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[Path],
    verify_data: Sequence[Path] | None,
    table: Any,
    settings: Any,
    budgets: Sequence[float],
    output: Path,
    say: Callable[[str], None] = lambda _: None,
    check_data: Sequence[Path] | None = None,
    check: int = 24,
    arms: Any = None,
) -> list[Path]:
    """Calibrates one seed at several budgets from one measurement of its risks; returns the files, old and new.

    Args:
        model: A model loaded with `attn_implementation="adaattn"`.
        encode: Text to token ids.
        data: Calibration text.
        verify_data: Held-out text of another source.
        table: Prices.
        settings: `CalibrationSettings`; its budget is replaced by each of `budgets`.
        budgets: Losses in nats/token.
        output: Directory of the files.
        say: Told what was found.
        check_data: Text of another kind, which plans are measured on once they are made.
        check: Sequences per length of it.
        arms: The model's arms, where they are at hand.
    """
    from adaattn_hf.calibration import corpus
    from adaattn_hf.calibration.calibrate import choose_and_verify, save_plan
    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.measure import measure
    from adaattn_hf.calibration.search import picks_of
    from adaattn_hf.patches.plans.subject import Subject

    from .held_out import ratio

    wanted = [replace(settings, budget=budget) for budget in budgets]
    paths = [output / f"seed-{settings.seed:03d}-{budget:.6f}.json" for budget in budgets]
    words = [described(one, model, data, verify_data, check_data, check) for one in wanted]
    missing = [place for place, path in enumerate(paths) if not done(path, words[place])]
    if not missing:
        return paths
    start = time.perf_counter()
    inputs = open_inputs(Subject(model), encode, data, wanted[0], verify_data=verify_data)
    measurement = measure(inputs if arms is None else replace(inputs, arms=arms), prices=table)
    texts = {
        length: corpus.draw(check_data, encode, length, {"check": check}, settings.seed).parts["check"]
        for length in settings.lengths
        if check_data
    }
    measuring = time.perf_counter() - start
    for place in missing:
        start = time.perf_counter()
        result = choose_and_verify(measurement, wanted[place])
        picks = picks_of(measurement, result.plan)
        result.report.pop("prices")
        if result.met:
            kept = output / "plans" / paths[place].stem
            kept.mkdir(parents=True, exist_ok=True)
            save_plan(inputs.subject, result, kept)
            inputs.subject.remove_plan()
        record = {
            "settings": words[place],
            "budget": wanted[place].budget,
            "seed": settings.seed,
            "met": result.met,
            "sentence": result.sentence,
            "kv_heads": measurement.layers.kv_heads,
            "picks": [measurement.layers.candidates.choices[pick].label for pick in picks],
            "report": result.report,
            "check": checked(measurement, result.plan, texts),
            "ratio": {str(n): ratio(measurement, picks, n) for n in settings.lengths},
            "prices": table.digest,
            "seconds": {"measure": measuring, "choose_and_verify": time.perf_counter() - start},
            "provenance": provenance(measurement.inputs.arms.device),
        }
        write(paths[place], record)
        tries = sum("verified" in entry for entry in result.report["history"])
        say(f"seed {settings.seed}, {wanted[place].budget:.2e}: {tries} tries, {result.sentence}")
    return paths


@app.command()
def prices(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option(help="Where the price table goes.")],
    lengths: Lengths = "4096,8192",
    families: Families = FAMILIES,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    gguf_file: Gguf = None,
) -> None:
    """Time the launches of every choice on this machine, with queries, keys and values of real text."""
    from adaattn_hf._files import write_atomically
    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.layers import observe_layers
    from adaattn_hf.calibration.measure import price_table
    from adaattn_hf.calibration.settings import CalibrationSettings
    from adaattn_hf.patches.plans.subject import Subject

    loaded, encode = load(model, dtype, device, gguf_file, threads)
    settings = CalibrationSettings(
        lengths=tuple(numbers(lengths)),
        sequences=1,
        joint=1,
        held_out=2,
        tries=1,
        families=tuple(families.split(",")),
    )
    inputs = open_inputs(Subject(loaded), encode, data, settings)
    layers = observe_layers(inputs)
    write_atomically(output, price_table(inputs, layers).to_json().encode())
    typer.echo(f"prices of {len(layers.candidates.choices)} choices: {output}")


@app.command()
def seeds(
    model: Model,
    data: Data,
    prices: Prices,
    output: Output,
    verify_data: Held = None,
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0-19.")] = "0-19",
    budgets: Annotated[str, typer.Option(help="Rises of the perplexity or nats/token, by commas.")] = "0.1%",
    lengths: Lengths = "4096,8192",
    sequences: Annotated[int, typer.Option(help="Sequences per length that risks are measured on.")] = 3,
    rows: Rows = 256,
    labels: Labels = 2,
    joint: Annotated[int, typer.Option(help="Sequences per length that re-scale the risks.")] = 4,
    held_out: HeldOut = 16,
    most_held_out: Annotated[int, typer.Option(help="Held-out sequences of the last look.")] = 36,
    bolder: Annotated[int, typer.Option(help="Bolder plans that may follow one that passed with room.")] = 2,
    haystacks: Annotated[int, typer.Option(help="Held-out sequences that carry needles.")] = 4,
    check_data: Check = None,
    check: Annotated[int, typer.Option(help="Sequences per length of --check-data.")] = 24,
    families: Families = FAMILIES,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = None,
    gguf_file: Gguf = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no further seed is begun.")] = float("inf"),
) -> None:
    """Calibrate once per seed and budget, and keep what held-out text said. Exit code 3: the limit came first."""
    from adaattn_hf.calibration.arms import ModelArms
    from adaattn_hf.calibration.calibrate import CalibrationSettings
    from adaattn_hf.cli.options import nats
    from adaattn_hf.policy.prices import PriceTable

    begin = time.perf_counter()
    loaded, encode = load(model, dtype, device, gguf_file, threads)
    arms = remembering(ModelArms(loaded))
    table = PriceTable.from_json(prices.read_text(encoding="utf-8"))
    wanted = [nats(part) for part in budgets.split(",")]
    longest = 0.0
    for seed in numbers(seeds):
        start = time.perf_counter()
        if start - begin + longest > limit:
            typer.echo(f"stopped before seed {seed}: {limit:g} seconds are over; run the same command again")
            raise typer.Exit(3)
        settings = CalibrationSettings(
            lengths=tuple(numbers(lengths)), seed=seed, sequences=sequences, rows=rows, labels=labels, joint=joint,
            held_out=held_out, most_held_out=max(held_out, most_held_out), bolder=bolder, haystacks=haystacks,
            families=tuple(families.split(",")),
        )  # fmt: skip
        seed_study(
            loaded,
            encode,
            data,
            verify_data,
            table,
            settings,
            wanted,
            output,
            typer.echo,
            check_data,
            check,
            arms,
        )
        longest = max(longest, time.perf_counter() - start)


def run_app(command: typer.Typer, name: str, argv: Sequence[str] | None) -> None:
    """Runs a command of the study under its name; wrong arguments end with code 2."""
    try:
        command(args=None if argv is None else list(argv), prog_name=f"python -m studies.budget.{name}")
    except (EvalError, ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    run_app(app, "study", argv)


if __name__ == "__main__":
    main()
