"""Draws a plan as a grid of layers by heads in the terminal."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adaattn_hf._files import printable
from adaattn_hf.eval.progress import tell
from adaattn_hf.plans.choices import EXACT, Choice
from adaattn_hf.plans.evidence import LEVEL
from adaattn_hf.plans.limits import unproven, verdict_of
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.wording import allowed, in_nats, legend, rise, share, times

from .headline import Bought, headline, name_of, speed_of

MOST_ROWS, MOST_COLUMNS = 256, 128
"""Most layers and key/value heads that a picture shows."""
NAMED_COLUMNS = 5
"""Up to so many key/value heads a terminal shows the names of choices, above that one letter each."""


def grid(plan: Plan) -> list[list[Choice]]:
    """Returns the choices `[layers][heads]` that a picture shows, exact in layers that the plan does not contain."""
    planned = {layer.layer: layer.choices for layer in plan.layers}
    width = min(max((len(choices) for choices in planned.values()), default=1), MOST_COLUMNS)
    return [list(planned.get(index, (EXACT,) * width))[:width] for index in layers_of(plan)]


def layers_of(plan: Plan) -> list[int]:
    """Returns the layers that a picture shows: those of the model, or all up to the last that is not exact."""
    deepest = max((layer.layer for layer in plan.layers), default=-1)
    return list(plan.attention_layers or range(deepest + 1))[:MOST_ROWS]


def notes(plan: Plan) -> list[str]:
    """Returns lines on what the picture does not show: layers, decode steps, the cache."""
    beyond = max((layer.layer for layer in plan.layers), default=-1) + 1
    lines = [f"layers {beyond} and up: exact"] if beyond and not plan.attention_layers else []
    if plan.exact_steps:
        lines.append("decode steps stay exact: the plan is no faster there")
    if plan.cache is not None:
        stored, streaming = plan.cache
        lines.append(f"cache: {stored}{', heads with a window keep it alone' * streaming}")
    depth = max(len(plan.attention_layers), beyond)
    width = max((len(layer.choices) for layer in plan.layers), default=0)
    if depth > MOST_ROWS or width > MOST_COLUMNS:
        lines.append(
            f"{depth} layers of up to {width} key/value heads; shown are the first {MOST_ROWS} by {MOST_COLUMNS}"
        )
    return [printable(line) for line in lines]


def details(plan: Plan) -> list[str]:
    """Returns lines on how a plan was made and verified, in nats and levels: what a headline leaves out."""
    lines = [
        f"{name_of(plan)}: {plan.model_type}, {plan.dtype}, lengths {', '.join(map(str, plan.lengths))}",
        f"made with adaattn {plan.adaattn}, torch {plan.torch}, transformers {plan.transformers}",
    ]
    scoring = plan.protocol.get("scoring")
    if isinstance(scoring, Mapping):
        named = {"predicts": "scored on", "retrieval": "retrieval:"}
        lines += [f"{words} {scoring[key]}" for key, words in named.items() if key in scoring]
    lines.append(f"budget {allowed(plan.budget)}, {in_nats(plan.budget)} nats/token")
    speed = speed_of(plan)
    if speed is not None:
        lines.append(
            f"predicted increase {rise(plan.predicted_loss)}, {in_nats(plan.predicted_loss)} nats/token; attention "
            f"{times(speed)} times as fast as exact, by the prices measured for it"
        )
    if plan.verified is not None:
        level = plan.verified.confidence
        lines.append(verdict_of(plan))
        if unproven(plan) is None:
            lines.append(
                f"{share(level, 2)}: this look at this plan may err by {share(1.0 - level, 2)}, all looks at all plans "
                f"by {share(1.0 - LEVEL)}"
            )
    return [printable(line) for line in lines]


def heat_map(plan: Plan) -> Table:
    """Returns a table for the terminal, one row per layer, one cell per key/value head."""
    choices = grid(plan)
    table, width, codes = Table(pad_edge=False), max(map(len, choices), default=0), _codes(choices)
    table.add_column("layer", justify="right")
    if codes:
        table.add_column(f"heads 0 to {width - 1}", overflow="fold")
    for head in range(0 if codes else width):
        table.add_column(str(head), justify="center")
    for index, row in zip(layers_of(plan), choices, strict=True):
        named = [(codes.get(choice, f" {choice.label} "), choice.colour) for choice in row]
        cells = [Text(words, style=f"white on rgb({','.join(map(str, colour))})") for words, colour in named]
        table.add_row(str(index), *([Text().join(cells)] if codes else cells))
    return table


def below(plan: Plan) -> list[str]:
    """Returns the lines under a plan's table: what its labels mean, and what it does not show."""
    choices = grid(plan)
    named = [] if plan.is_exact else [f"{code} {choice.label}" for choice, code in _codes(choices).items()]
    return [*filter(None, [", ".join(named), legend(itertools.chain(*choices))]), *notes(plan)]


def _codes(choices: Sequence[Sequence[Choice]]) -> dict[Choice, str]:
    """One letter for each choice, where rows are too wide for names."""
    if max(map(len, choices), default=0) <= NAMED_COLUMNS:
        return {}
    letters = itertools.chain("·", string.ascii_uppercase, map(chr, itertools.count(ord("a"))))
    return dict(zip(dict.fromkeys((EXACT, *itertools.chain(*choices))), letters, strict=False))


def print_plan(console: Console, plan: Plan, buys: Bought, verbose: bool, instead: str | None = None) -> None:
    """Prints a plan: in one line what it comes to, then its picture and what its labels mean.

    `verbose` prints nats, levels and versions, too; `instead` is said in place of the headline, where no plan passed.
    """
    tell(console, f"{name_of(plan)}: {instead or headline(plan, buys)}")
    if not plan.is_exact:
        tell(console, "layers by key/value heads")
        console.print(heat_map(plan))
    for line in (*below(plan), *(details(plan) if verbose else ())):
        tell(console, line)
