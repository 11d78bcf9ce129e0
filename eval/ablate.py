"""`adaattn ablate`: what each kind of approximation buys alone and together, at the same budgets.

One calibration of risks and prices, then the knapsack with the choices of one kind at a time, each plan
measured on the same held-out text: rank only, precision only, sparsity only, all together; and the uniform
choices beside them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def only(kind: str) -> Callable[[Any], bool]:
    """Returns whether a choice is allowed in an arm of the ablation; see `ARMS`."""
    tests: dict[str, Callable[[Any], bool]] = {
        "rank": lambda choice: choice.kind == "exact" and choice.precision == "model",
        "precision": lambda choice: choice.kind == "exact" and not choice.rank,
        "sparsity": lambda choice: choice.precision == "model" and not choice.rank,
        "combined": lambda choice: True,
    }
    return tests[kind]


ARMS = ("rank", "precision", "sparsity", "combined")


def ablate_model(
    model: Any,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[Path],
    budgets: Sequence[float],
    settings: Any,
    *,
    verify_data: Sequence[Path] | None = None,
    prices: Any = None,
    scoring: Any = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Returns the table: per arm and budget the predicted loss, the measured loss and KL, and the price.

    Args:
        model: A model loaded with `attn_implementation="adaattn"`.
        encode: Text to token ids.
        data: Calibration text.
        budgets: Losses in nats/token.
        settings: `CalibrationSettings`.
        verify_data: Held-out text of another source.
        prices: Prices measured before.
        scoring: What the model is scored on, next tokens when absent; see `calibration.scoring`.
        say: Told what is being done.
    """
    from adaattn_hf.calibration.calibrate import ablation_rows, prepare_run
    from adaattn_hf.calibration.scoring import NEXT_TOKEN

    run = prepare_run(model, encode, list(data), settings, verify_data, prices, scoring or NEXT_TOKEN)
    rows: list[dict[str, Any]] = []
    for arm in ARMS:
        for budget in budgets:
            say(f"{arm} at {budget:.2e} nats/token")
            rows.append({"arm": arm, "budget": budget, **ablation_rows(run, only(arm), budget)})
    for choice in run.candidates.choices[1:]:
        say(f"uniform {choice.label}")
        rows.append({"arm": "uniform", "choice": choice.label, **run.uniform(choice)})
    return {
        "lengths": list(settings.lengths),
        "rows": rows,
        "machine": run.table.machine if run.table else "",
    }


def terminal_table(result: dict[str, Any]) -> Table:
    """Returns the result as a table for the terminal."""
    table = Table(title="loss (nats/token) against price, longest length")
    for name in ("arm", "budget or choice", "predicted", "measured Δnll", "measured KL", "times faster"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in result["rows"]:
        name = row["choice"] if row["arm"] == "uniform" else f"{row['budget']:.1e}"
        table.add_row(
            row["arm"],
            name,
            f"{row['predicted']:.2e}",
            f"{row['delta_nll']:+.2e}",
            f"{row['kl']:.2e}",
            f"{row['ratio']:.2f}",
        )
    return table


def ablate(
    model: Annotated[str, typer.Argument(help="Hub id or directory of a causal or masked LM.")],
    data: Annotated[list[Path], typer.Option(help="Text: .txt, .jsonl, or directories of them.")],
    budgets: Annotated[
        str, typer.Option(help="Rises of the perplexity or nats/token, by commas.")
    ] = "0.1%,1%",
    verify_data: Annotated[list[Path] | None, typer.Option(help="Held-out text of another source.")] = None,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    sequences: Annotated[int, typer.Option(help="Sequences that risks are measured on.")] = 2,
    held_out: Annotated[int, typer.Option(help="Held-out sequences per arm.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("results/ablation.json"),
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
) -> None:
    """Show what rank, precision and sparsity buy alone and together at the same loss."""
    from adaattn_hf.calibration.calibrate import CalibrationSettings
    from adaattn_hf.calibration.command import nats
    from adaattn_hf.calibration.loading import load
    from adaattn_hf.files import write_atomically

    console, errors = Console(), Console(stderr=True)
    try:
        loaded = load(model, dtype=dtype, gguf_file=gguf_file)
        settings = CalibrationSettings(
            lengths=(length,), sequences=sequences, held_out=held_out, seed=seed, tries=1, haystacks=0
        )
        result = ablate_model(
            loaded.model,
            loaded.encode,
            data,
            [nats(part) for part in budgets.split(",")],
            settings,
            verify_data=verify_data,
            scoring=loaded.scoring,
            say=lambda text: console.print(text, markup=False, highlight=False),
        )
    except (ValueError, FileNotFoundError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from error
    write_atomically(
        output, (json.dumps({"model": model, **result}, indent=1, sort_keys=True) + "\n").encode()
    )
    console.print(terminal_table(result))


if __name__ == "__main__":
    from adaattn_hf.cli import main

    main(["ablate", *sys.argv[1:]])
