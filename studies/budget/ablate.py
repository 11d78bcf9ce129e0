"""What each kind of approximation buys alone and together: `python -m studies.budget.ablate MODEL --data TEXT`.

One calibration of risks and prices, then the knapsack with the choices of one kind at a time, each plan
measured on the same held-out text: rank only, precision only, sparsity only, all together; and the uniform
choices beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from adaattn_hf.cli.interrupt import interrupted, terminate_like_interrupt
from adaattn_hf.eval.pages import harmless

from ..pages import loss, percent, table
from .study import run_app, write

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
ARMS = ("rank", "precision", "sparsity", "combined")
_HEAD = ("arm", "budget or choice", "predicted KL", "measured KL", "measured Δnll", "times as fast")


def only(kind: str) -> Callable[[Any], bool]:
    """Returns whether a choice is allowed in an arm of the ablation; see `ARMS`."""
    if kind == "combined":
        return lambda choice: True
    return lambda choice: all(part.aspect == kind for part in choice.parts)


def ablate_model(
    model: Any,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[Path],
    budgets: Sequence[float],
    settings: Any,
    *,
    verify_data: Sequence[Path] | None = None,
    scoring: Any = None,
    prices: Any = None,
    say: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Returns the table: per arm and budget the predicted loss, the measured loss and KL, and the price.

    Args:
        model: A model loaded with `attn_implementation="adaattn"`.
        encode: Text to token ids.
        data: Calibration text.
        budgets: Losses in nats/token.
        settings: `CalibrationSettings`.
        verify_data: Held-out text of another source.
        scoring: What the model is scored on; the next token when absent.
        prices: Prices measured before.
        say: Told what is being done.
        keep: Handed the table after every row.
    """
    import numpy as np

    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.measure import measure
    from adaattn_hf.calibration.scoring import NEXT_TOKEN
    from adaattn_hf.calibration.search import solve

    from .held_out import HeldOutPasses

    say("risks and prices")
    inputs = open_inputs(
        model, encode, data, settings, verify_data=verify_data, scoring=scoring or NEXT_TOKEN
    )
    measurement = measure(inputs, prices=prices)
    passes = HeldOutPasses(measurement)
    rows: list[dict[str, Any]] = []
    found = {"lengths": list(settings.lengths), "rows": rows, "machine": measurement.table.machine}
    for arm in ARMS:
        for budget in budgets:
            say(f"{arm} at {budget:.2e} nats/token")
            limit = np.full(len(settings.lengths), budget)
            picks = solve(measurement, limit, allowed=only(arm)).picks
            rows.append({"arm": arm, "budget": budget, **passes.evaluate(picks)})
            keep(found)
    for choice in measurement.layers.candidates.choices[1:]:
        say(f"uniform {choice.label}")
        rows.append({"arm": "uniform", "choice": choice.label, **passes.uniform(choice)})
        keep(found)
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the result in the columns of `_HEAD`."""
    name = row["choice"] if row["arm"] == "uniform" else percent(row["budget"])
    losses = (loss(row["predicted"]), loss(row["kl"]), f"{row['delta_nll']:+.2e}")
    return [row["arm"], name, *losses, f"{row['ratio']:.2f}"]


def page(result: Mapping[str, Any]) -> str:
    """Returns the result as a page; every number is in it, or a quotient of two that are."""
    result = harmless(result)
    rows, settings, made = result["rows"], result["settings"], result["provenance"]
    versions = made["versions"]
    gaps = [row["kl"] / row["predicted"] for row in rows if "budget" in row and row["predicted"]] or [1.0]
    lines = [
        "# What rank, precision and sparsity buy alone and together",
        "",
        f"`python -m studies.budget.ablate` on {result['model']} in {settings['dtype']} at {result['lengths'][-1]}"
        " tokens: one measurement of risks and prices, then the cheapest plan inside a budget that one kind of choice"
        " alone can give, and that all together can. Losses are in nats/token and measured on held-out text; the budget"
        " binds the predicted KL. Plans are chosen by prefill and decode; times are of prefill, by the price table.",
        "",
        f"* calibration text: {', '.join(settings['data'])}, {settings['sequences']} sequences; held-out text:"
        f" {', '.join(settings['verify_data'] or settings['data'])}, {settings['held_out']} sequences",
        f"* losses: {made['device']}; prices: {result['machine']}; torch {versions['torch']}, transformers"
        f" {versions['transformers']}" + (f", commit {made['commit']}" if made["commit"] else ""),
        f"* nothing is scaled or verified here, as `adaattn calibrate` does: the measured KL of the arms is"
        f" {min(gaps):.2f} to {max(gaps):.2f} of the predicted one",
        "",
    ]
    for budget in sorted({row["budget"] for row in rows if "budget" in row}):
        by_arm = {row["arm"]: row for row in rows if row.get("budget") == budget}
        alone = max(ARMS[:-1], key=lambda arm: by_arm[arm]["ratio"])
        both = by_arm["combined"]
        lines.append(
            f"* {percent(budget)}: together {both['ratio']:.2f} times as fast as exact at a measured Δnll of"
            f" {both['delta_nll']:+.2e} (KL {loss(both['kl'])}), the best kind alone ({alone})"
            f" {by_arm[alone]['ratio']:.2f}."
        )
    return "\n".join([*lines, "", *table(_HEAD, [_cells(row) for row in rows])])


@app.command()
def ablate(
    model: Annotated[str, typer.Argument(help="Hub id or directory of a causal or masked LM.")],
    data: Annotated[list[Path], typer.Option(help="Text: .txt, .jsonl, or directories of them.")],
    budgets: Annotated[
        str, typer.Option(help="Rises of the perplexity or nats/token, by commas.")
    ] = "0.1%,1%",
    verify_data: Annotated[list[Path] | None, typer.Option(help="Held-out text of another source.")] = None,
    length: Annotated[str, typer.Option(help="Tokens per sequence (2048 or 2k).")] = "2048",
    sequences: Annotated[int, typer.Option(help="Sequences that risks are measured on.")] = 2,
    held_out: Annotated[int, typer.Option(help="Held-out sequences per arm.")] = 4,
    families: Annotated[
        str, typer.Option(help="Kinds of choices: window,rank,bf16,int8.")
    ] = "window,bf16,int8,rank",
    prices: Annotated[
        Path | None, typer.Option(help="Prices that a calibration measured, in the place of new ones.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the JSON goes; a `.md` is written beside it.")] = Path(
        "results/ablation.json"
    ),
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")
    ] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda. Default: cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
) -> None:
    """Show what rank, precision and sparsity buy alone and together at the same loss.

    Exit codes: 0 done; 2 wrong arguments; 130 interrupted, with the finished rows in FILE.partial of --output.
    """
    from adaattn_hf._files import write_atomically
    from adaattn_hf.calibration.corpus import refuse_repeats
    from adaattn_hf.calibration.settings import CalibrationSettings
    from adaattn_hf.cli.loading import load
    from adaattn_hf.cli.options import kinds, known_prices, nats, tokens, use_threads, writable
    from adaattn_hf.eval.provenance import provenance
    from adaattn_hf.patches.checkpoint import resolve_device

    partial = output.with_name(f"{output.name}.partial")
    use_threads(threads)
    writable(output.parent, "output")
    refuse_repeats(data, verify_data)
    where = resolve_device(device)
    settings = CalibrationSettings(
        lengths=tokens(length),
        sequences=sequences,
        held_out=held_out,
        seed=seed,
        families=kinds(families),
        tries=1,
        haystacks=0,
    )
    known = known_prices(prices)
    allowed = [nats(part) for part in budgets.split(",")]
    partial.unlink(missing_ok=True)
    try:
        with terminate_like_interrupt():
            loaded = load(model, dtype=dtype, gguf_file=gguf_file)
            result = ablate_model(
                loaded.model.to(where),
                loaded.encode,
                data,
                allowed,
                settings,
                verify_data=verify_data,
                scoring=loaded.scoring,
                prices=known,
                say=typer.echo,
                keep=lambda table: write(partial, table),
            )
    except KeyboardInterrupt:
        interrupted(f"finished rows are kept in {partial}" if partial.is_file() else "no row was finished")
    result["model"] = Path(model).name
    result["settings"] = {
        "data": [path.name for path in data],
        "verify_data": [path.name for path in verify_data or []],
        "dtype": str(getattr(loaded.model, "dtype", dtype)).removeprefix("torch."),
        **{name: getattr(settings, name) for name in ("sequences", "held_out", "seed", "families")},
    }
    result["provenance"] = provenance(where)
    write(output, result)
    write_atomically(output.with_suffix(".md"), page(result))
    partial.unlink(missing_ok=True)
    typer.echo(f"report: {output.with_suffix('.md')}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    run_app(app, "ablate", argv)


if __name__ == "__main__":
    main()
