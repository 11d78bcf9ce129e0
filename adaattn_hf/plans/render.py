"""Draws a plan as a grid of layers by heads, in the terminal and as PNG."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

from rich.table import Table
from rich.text import Text

from .._files import write_atomically
from .choices import EXACT, Choice
from .plan import Plan

MOST_ROWS, MOST_COLUMNS = 256, 128
"""Most layers and key/value heads that a picture shows."""
NAMED_COLUMNS = 5
"""Up to so many key/value heads a terminal shows the names of choices, above that one letter each."""


def printable(text: str) -> str:
    """Returns a text on one line, with control and formatting characters escaped so that no terminal obeys them."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def grid(plan: Plan, layers: int | None = None, heads: int | None = None) -> list[list[Choice]]:
    """Returns the choices `[layers][heads]` that a picture shows, exact in layers that the plan does not contain."""
    known = {layer.layer: layer.choices for layer in plan.layers}
    width = min(heads or max((len(choices) for choices in known.values()), default=1), MOST_COLUMNS)
    depth = min(layers or max(known, default=-1) + 1, MOST_ROWS)
    return [list(known.get(index, (EXACT,) * width))[:width] for index in range(depth)]


def facts(plan: Plan) -> list[str]:
    """Returns lines that describe a plan."""
    lines = [
        f"{plan.model_type}, {plan.dtype}, budget {plan.budget:.3g} nats/token, lengths {list(plan.lengths)}",
        f"made with adaattn {plan.adaattn}, torch {plan.torch}, transformers {plan.transformers}",
    ]
    scoring = plan.protocol.get("scoring")
    if isinstance(scoring, Mapping):
        named = {"predicts": "scored on", "retrieval": "retrieval:"}
        lines += [f"{words} {scoring[key]}" for key, words in named.items() if key in scoring]
    if plan.cache is not None:
        stored, streaming = plan.cache
        lines.append(f"cache: {stored}{', heads with a window keep it alone' * streaming}")
    if plan.exact_steps:
        lines.append("decode steps stay exact: no choice was faster there")
    depth = max((layer.layer for layer in plan.layers), default=-1) + 1
    width = max((len(layer.choices) for layer in plan.layers), default=0)
    if depth > MOST_ROWS or width > MOST_COLUMNS:
        lines.append(
            f"{depth} layers of up to {width} key/value heads; shown are the first {MOST_ROWS} by {MOST_COLUMNS}"
        )
    return [printable(line) for line in lines]


def summary(plan: Plan) -> list[str]:
    """Returns lines that describe a plan and its verification."""
    lines = facts(plan)
    exact, price = sum(unit.exact_price for unit in plan.units), sum(unit.price for unit in plan.units)
    if plan.units and price > 0.0:
        lines.append(
            f"predicted loss {plan.predicted_loss:.2e} nats/token; attention of the planned layers "
            f"{exact / price:.2f} times as fast as exact, by the prices measured for it"
        )
    lines.append(
        plan.verified.sentence
        if plan.verified
        else "not verified: the plan is exact"
        if plan.is_exact
        else "not verified"
    )
    rate = plan.protocol.get("settings", {}).get("alpha")
    if plan.verified and rate is not None:
        level = plan.verified.confidence
        lines.append(
            f"{level:.2%}: this look at this plan may err by {1 - level:.2%}, all looks at all plans by {rate:.0%}"
        )
    return [printable(line) for line in lines]


def heat_map(plan: Plan) -> Table:
    """Returns a table for the terminal, one row per layer, one cell per key/value head."""
    choices = grid(plan)
    if not choices:
        return Table(title="every layer is exact", min_width=24, show_header=False, box=None)
    table = Table(title="layers by key/value heads", pad_edge=False, min_width=28)
    table.add_column("layer", justify="right")
    width = max((len(row) for row in choices), default=0)
    if width > NAMED_COLUMNS:
        codes = {
            c: letter(place) for place, c in enumerate(dict.fromkeys((EXACT, *itertools.chain(*choices))))
        }
        table.add_column(f"heads 0 to {width - 1}", overflow="fold")
        for index, row in enumerate(choices):
            table.add_row(str(index), Text().join(_cell(codes[c], c) for c in row))
        table.caption = ", ".join(f"{code} {choice.label}" for choice, code in codes.items())
        return table
    for head in range(width):
        table.add_column(str(head), justify="center")
    for index, row in enumerate(choices):
        table.add_row(str(index), *(_cell(f" {c.label} ", c) for c in row))
    return table


def letter(place: int) -> str:
    """Returns the letter of a choice by its index; exact is a dot."""
    return "·" if place == 0 else chr(64 + place) if place <= 26 else chr(70 + place)


def _cell(words: str, choice: Choice) -> Text:
    return Text(words, style=f"white on rgb({','.join(map(str, choice.colour))})")


def differences(left: Plan, right: Plan) -> list[tuple[int, int, Choice, Choice]]:
    """Returns the units on which two plans differ: layer, head, choice of each."""
    first, second = ({layer.layer: layer.choices for layer in plan.layers} for plan in (left, right))
    found = []
    for index in sorted({*first, *second}):
        pairs = zip_longest(first.get(index, ()), second.get(index, ()), fillvalue=EXACT)
        found += [(index, head, a, b) for head, (a, b) in enumerate(pairs) if a != b]
    return found


def save_png(plan: Plan, path: Path) -> None:
    """Writes the picture as PNG; needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    choices = grid(plan)
    width = max((len(row) for row in choices), default=1)
    figure = Figure(figsize=(2 + 0.5 * width, 1.5 + 0.22 * max(len(choices), 1)), layout="constrained")
    axes = figure.subplots()
    image = [[[value / 255 for value in choice.colour] for choice in row] for row in choices] or [
        [[0.3, 0.3, 0.3]]
    ]
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_xlabel("key/value head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(width))
    kinds = sorted({choice for row in choices for choice in row}, key=lambda choice: choice.label)
    handles = [Patch(color=f"#{bytes(choice.colour).hex()}", label=choice.label) for choice in kinds]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    write_atomically(path, drawn.getvalue())
