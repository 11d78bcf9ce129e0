"""A plan as a picture of layers by heads: in the terminal, as HTML, as PNG."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adaattn_hf.files import write_atomically
from adaattn_hf.plan import EXACT, Choice, Plan

_KINDS = {"exact": (70, 70, 70), "window": (30, 110, 170), "blocks": (140, 80, 160)}


def colour(choice: Choice) -> tuple[int, int, int]:
    """Returns the colour of a choice: grey exact, blue windows, violet blocks, greener in low precision."""
    red, green, blue = _KINDS[choice.kind]
    if choice.kind == "window":
        blue = max(120, 250 - choice.window // 20)
    if choice.precision != "model":
        green = min(255, green + (60 if choice.precision == "bf16" else 110))
    if choice.rank:
        red = min(255, red + 90)
    return red, green, blue


def grid(plan: Plan, layers: int | None = None, heads: int | None = None) -> list[list[Choice]]:
    """Returns the choices `[layers][heads]`, exact where the plan is silent."""
    known = {layer.layer: layer.choices for layer in plan.layers}
    width = heads or max((len(choices) for choices in known.values()), default=1)
    depth = layers or max(known, default=-1) + 1
    return [list(known.get(index, (EXACT,) * width)) for index in range(depth)]


def summary(plan: Plan) -> list[str]:
    """Returns what a plan is and what was proved of it, in lines."""
    lines = [
        f"{plan.model_type}, {plan.dtype}, budget {plan.budget:.3g} nats/token, lengths {list(plan.lengths)}",
        f"made with adaattn {plan.adaattn}, torch {plan.torch}, transformers {plan.transformers}",
    ]
    scoring = plan.protocol.get("scoring", {})
    if scoring:
        lines.append(f"scored on {scoring['predicts']}")
    if "retrieval" in scoring:
        lines.append(f"retrieval: {scoring['retrieval']}")
    risk = sum(unit.risk for unit in plan.units)
    exact, price = sum(unit.exact_price for unit in plan.units), sum(unit.price for unit in plan.units)
    if plan.units:
        lines.append(
            f"predicted loss {risk:.2e} nats/token; attention of the planned layers {exact / price:.2f} times as "
            "fast as exact, by the prices it was chosen by"
        )
    lines.append(
        plan.verified.sentence
        if plan.verified
        else "not verified: the plan is exact"
        if plan.is_exact
        else "not verified"
    )
    return lines


def heat_map(plan: Plan) -> Table:
    """Returns a table for the terminal, one row per layer, one cell per key/value head."""
    choices = grid(plan)
    if not choices:
        return Table(title="every layer is exact", min_width=24, show_header=False, box=None)
    table = Table(title="layers by key/value heads", pad_edge=False, min_width=28)
    table.add_column("layer", justify="right")
    width = max((len(row) for row in choices), default=0)
    for head in range(width):
        table.add_column(str(head), justify="center")
    for index, row in enumerate(choices):
        cells = [Text(f" {c.label} ", style=f"white on rgb({','.join(map(str, colour(c)))})") for c in row]
        table.add_row(str(index), *cells)
    return table


def differences(left: Plan, right: Plan) -> list[tuple[int, int, Choice, Choice]]:
    """Returns the units on which two plans differ: layer, head, choice of each."""
    depth = max([0, *(layer.layer + 1 for plan in (left, right) for layer in plan.layers)])
    first, second = grid(left, depth), grid(right, depth)
    width = max([0, *(len(row) for row in first + second)])
    found = []
    for index in range(depth):
        a, b = first[index] + [EXACT] * width, second[index] + [EXACT] * width
        found += [(index, head, a[head], b[head]) for head in range(width) if a[head] != b[head]]
    return found


def save_html(plan: Plan, path: Path) -> None:
    """Writes what the terminal shows as a page of its own."""
    console = Console(record=True, file=io.StringIO(), width=200)
    console.print(heat_map(plan))
    for line in summary(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    write_atomically(path, console.export_html(inline_styles=True))


def save_png(plan: Plan, path: Path) -> None:
    """Writes the picture as PNG; needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    choices = grid(plan)
    width = max((len(row) for row in choices), default=1)
    figure = Figure(figsize=(2 + 0.5 * width, 1.5 + 0.22 * max(len(choices), 1)), layout="constrained")
    axes = figure.subplots()
    image = [[[value / 255 for value in colour(choice)] for choice in row] for row in choices] or [
        [[0.3, 0.3, 0.3]]
    ]
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_xlabel("key/value head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(width))
    kinds = sorted({choice for row in choices for choice in row}, key=lambda choice: choice.label)
    handles = [Patch(color=f"#{bytes(colour(choice)).hex()}", label=choice.label) for choice in kinds]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    write_atomically(path, drawn.getvalue())
