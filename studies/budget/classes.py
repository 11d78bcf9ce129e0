"""Would a choice for each class of lengths buy more than windows do? `python -m studies.budget.classes …` measures it.

A window is exact for the rows that are shorter than it. Beyond that a head could take one choice in short prompts and
another in long ones, or one in the early rows of a prompt and another in the late ones. Risks of both are measured on
the same sequences, the same knapsack chooses with one choice per head and with one per head and class, and the
predicted times of attention are set side by side at equal predicted loss. Fixed costs of launches are left out, and
risks are those that the choice was made by: both favour classes.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from torch import Tensor

from adaattn_hf.eval.provenance import provenance

from ..pages import loss, table
from . import study

if TYPE_CHECKING:
    from adaattn_hf.calibration.inputs import Inputs
    from adaattn_hf.calibration.layers import Layers
    from adaattn_hf.calibration.scoring import Reading
    from adaattn_hf.policy.knapsack import Allocation
    from adaattn_hf.policy.prices import PriceTable

BUDGETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""Predicted losses, nats/token, that plans may have."""
FAMILIES = ("window", "bf16")
WORTH = 0.05
"""Saving of attention time, in the median of the limits, from which classes would be worth their code."""
SPENDS = "which spends the whole loss"
"""Marks figures that are not at equal loss."""
SLACK = 1.0001
"""Factor on a limit that a known plan just keeps, for the rounding of sums."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """A knapsack: prices, and risks by the limits that must be kept.

    Attributes:
        prices: `[units, choices]`.
        risks: `[limits, units, choices]`, nats/token.
    """

    prices: Array
    risks: Array

    def solved(self, budget: float) -> Allocation:
        """Returns the cheapest allocation within the budget at every limit."""
        from adaattn_hf.policy.knapsack import allocate

        return allocate(self.prices, self.risks, np.full(len(self.risks), budget))


def in_classes(parts: Sequence[Problem]) -> Problem:
    """Returns the problem in which each class of rows has a choice of its own and all share one limit."""
    return Problem(
        np.concatenate([one.prices for one in parts]), np.concatenate([one.risks for one in parts], axis=1)
    )


def together(parts: Sequence[Problem]) -> Problem:
    """Returns the problem in which one choice serves all classes of rows, whose risks add up."""
    return Problem(
        np.sum([one.prices for one in parts], axis=0), np.sum([one.risks for one in parts], axis=0)
    )


def seconds(prices: PriceTable, choices: Sequence[Any], length: int) -> Array:
    """Returns the seconds `[choices]` of one head's prefill; no window costs more than all keys do."""
    found = []
    for choice in choices:
        over_all = "+".join(part.label for part in choice.operands) or "exact"
        labels = {choice.label, over_all}
        found.append(min(prices.price("prefill", length, label).slope for label in labels) if length else 0.0)
    return np.array(found)


def risks_of_rows(inputs: Inputs, layers: Layers, length: int, edges: Sequence[int]) -> Array:
    """Returns the risk `[classes, units, choices]` that each class of rows adds to the loss per token.

    Args:
        inputs: The model and its text.
        layers: Its layers and choices.
        length: Tokens of a prompt.
        edges: Borders of the classes, from 0 to `length`; each must be a border of the sampled strata of rows.
    """
    from adaattn_hf.calibration import fisher
    from adaattn_hf.calibration.measure import measured_readings

    s, combine = inputs.settings, layers.candidates.combine
    places = [edge * s.rows // length for edge in edges]
    sums = np.zeros((len(edges) - 1, len(layers.units), len(combine)))
    rows = 0

    def add(_: Reading, products: dict[int, Tensor]) -> None:
        nonlocal rows
        for number, (start, stop) in enumerate(pairwise(places)):
            mine = {index: product[:, :, start:stop] for index, product in products.items()}
            part, count = fisher.unit_risks(mine, layers.kv_heads, combine)
            sums[number] += part
            rows += count

    for number in range(len(inputs.samples[length].risk)):
        deque(
            measured_readings(inputs, layers, length, number, add), maxlen=0
        )  # `add` takes what is measured
    return sums / rows


def compared(
    inputs: Inputs, layers: Layers, prices: PriceTable, classes: Mapping[int, Sequence[int]]
) -> list[dict[str, Any]]:
    """Returns per budget the share of exact attention's time with one choice per head, and with one per class.

    Args:
        inputs: The model and its text.
        layers: Its layers and choices.
        prices: Times of the choices.
        classes: By length of a prompt, the borders of the classes of its rows.
    """
    choices, units = layers.candidates.choices, len(layers.units)
    rows: dict[int, list[Problem]] = {}
    for length, edges in classes.items():
        risks = risks_of_rows(inputs, layers, length, edges)
        until = [seconds(prices, choices, edge) for edge in edges]
        exact = units * until[-1][0]
        rows[length] = [
            Problem(np.tile((stop - start) / exact, (units, 1)), risks[number][None])
            for number, (start, stop) in enumerate(pairwise(until))
        ]
    whole = {length: together(parts) for length, parts in rows.items()}
    every = Problem(
        np.sum([one.prices for one in whole.values()], axis=0) / len(whole),
        np.concatenate([one.risks for one in whole.values()]),
    )
    found = []
    for budget in BUDGETS:
        one = every.solved(budget)
        pick = np.arange(units), one.picks
        found.append(
            {
                "budget": budget,
                "lengths": {
                    str(length): {
                        "one plan": float(problem.prices[pick].sum()),
                        "loss": float(one.risk[number]),
                        "its own, same loss": problem.solved(SLACK * float(one.risk[number])).price,
                        "its own, whole budget": problem.solved(budget).price,
                    }
                    for number, (length, problem) in enumerate(whole.items())
                },
                "rows": {
                    str(length): {
                        "one choice": whole[length].solved(budget).price,
                        "a choice per class": in_classes(parts).solved(budget).price,
                    }
                    for length, parts in rows.items()
                    if len(parts) > 1
                },
            }
        )
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """Returns the page of a record."""
    words, where = record["settings"], record["provenance"]
    parted = sorted((int(length), edges) for length, edges in record["classes"].items())
    found = [
        [
            f"a plan of its own for prompts of {length:,}, {words_of}",
            one["budget"],
            mine["one plan"],
            mine[key],
        ]
        for key, words_of in (
            ("its own, same loss", "at the loss of one plan for all"),
            ("its own, whole budget", SPENDS),
        )
        for length, _ in parted
        for one in record["compared"]
        for mine in [one["lengths"][str(length)]]
    ]
    for length, edges in parted:
        name = f"a choice per class of the rows of {length:,}: " + ", ".join(
            f"{start:,} to {stop - 1:,}" for start, stop in pairwise(edges)
        )
        found += [
            [name, one["budget"], rows["one choice"], rows["a choice per class"]]
            for one in record["compared"]
            if (rows := one["rows"].get(str(length)))
        ]
    verdict = []
    for name in dict.fromkeys(name for name, *_ in found):
        shares = [saved(one, split) for same, _, one, split in found if same == name]
        median = statistics.median(shares)
        worth = "worth it" if median >= WORTH else f"not worth it, {WORTH:.0%} would be"
        verdict.append(
            f"* {name}: saves {min(shares):.1%} to {max(shares):.1%} of the time of attention under a plan, "
            f"{median:.1%} in the median" + ("" if SPENDS in name else f" ({worth})")
        )
    return "\n".join(
        [
            "# Several choices per head, by classes of lengths",
            "",
            "Generated by `studies/budget/classes.py`. A window is exact for rows that are shorter than it. Would a",
            "choice of its own for short prompts, or for the early rows of a long one, save more time at equal loss?",
            "The same knapsack chooses with one choice per head, and with one per head and class.",
            "",
            f"* model: {words['model']} in {words['dtype']}; text: {', '.join(words['data'])}; {words['sequences']} "
            f"sequences per length, {words['rows']} rows, {words['labels']} label(s)",
            "* choices: windows and bfloat16 products",
            f"* prices: {record['machine']}, of {record['prices']}; shorter lengths follow the power law of those that "
            "were measured",
            "* fixed costs of launches are left out, and the loss is the one that was chosen by: both favour classes",
            f"* torch {where['versions']['torch']}, transformers {where['versions']['transformers']}",
            *verdict,
            "",
            *table(
                ["classes", "limit of the loss", "one choice", "one per class", "saves"],
                [
                    [name, loss(budget), f"{one:.4f}", f"{split:.4f}", f"{saved(one, split):.1%}"]
                    for name, budget, one, split in found
                ],
            ),
            "The middle columns are the predicted time of attention, as a share of that of exact attention. One plan",
            "for all lengths is chosen by the mean of both shares. Short prompts lose less than the limit under it; a",
            "plan of their own that spends the difference is what a calibration for that length alone makes.",
            "",
        ]
    )


def saved(one: float, split: float) -> float:
    """Returns the share of the time that classes save; the solver's gap may let them seem a trifle slower."""
    return max(1.0 - split / one, 0.0)


@app.command()
def classes(
    model: study.Model,
    data: study.Data,
    output: Annotated[Path, typer.Argument(help="The JSON; its page is written beside it.")],
    prices: Annotated[Path, typer.Option(help="JSON of a study that holds prices.")] = Path(
        "docs/results/budget.json"
    ),
    lengths: Annotated[str, typer.Option(help="Lengths of prompts.")] = "1024,4096",
    borders: Annotated[
        str, typer.Option(help="Rows at which the longest prompt's classes part.")
    ] = "512,1024,2048",
    sequences: Annotated[int, typer.Option(help="Sequences per length.")] = 2,
    rows: study.Rows = 256,
    labels: study.Labels = 2,
    dtype: study.Dtype = "float32",
    gguf_file: study.Gguf = None,
    threads: study.Threads = 1,
) -> None:
    """Compare one choice per head with one per head and class of lengths, by predicted loss and time."""
    from adaattn_hf._files import write_atomically
    from adaattn_hf.calibration.inputs import open_inputs
    from adaattn_hf.calibration.layers import observe_layers
    from adaattn_hf.calibration.settings import CalibrationSettings
    from adaattn_hf.policy.prices import PriceTable

    loaded, encode = study.load(model, dtype, "cpu", gguf_file, threads)
    known = PriceTable.from_json(json.dumps(json.loads(prices.read_text(encoding="utf-8"))["prices"]))
    settings = CalibrationSettings(
        lengths=tuple(study.numbers(lengths)), sequences=sequences, rows=rows, labels=labels, joint=1, held_out=2,
        most_held_out=2, tries=1, bolder=0, families=FAMILIES,
    )  # fmt: skip
    inputs = open_inputs(loaded, encode, data, settings)
    layers = observe_layers(inputs)
    parted = {length: [0, length] for length in settings.lengths}
    parted[settings.lengths[-1]] = [0, *study.numbers(borders), settings.lengths[-1]]
    record = {
        "settings": study.described(settings, loaded, data, None),
        "classes": {str(length): edges for length, edges in parted.items()},
        "machine": known.machine,
        "prices": prices.name,
        "compared": compared(inputs, layers, known, parted),
        "provenance": provenance(inputs.arms.device),
    }
    study.write(output, record)
    write_atomically(output.with_suffix(".md"), markdown(record).encode())
    typer.echo(f"{output}, {output.with_suffix('.md')}")


if __name__ == "__main__":
    study.run_app(app, "classes", None)
