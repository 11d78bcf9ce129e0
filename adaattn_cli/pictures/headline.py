"""A plan in the terminal: in one line what the perplexity may rise by and what that buys, and a grid of its heads.

How fast the whole model runs is in the report that lies beside a plan, and not in the plan, which is the same byte for
byte wherever it is made from the same prices.
"""

import hashlib
import itertools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adaattn_hf._files import parse_json, printable
from adaattn_hf.eval.progress import tell
from adaattn_hf.plans.choices import EXACT, Choice
from adaattn_hf.plans.limits import LEVEL, MODEL, SOURCES, Amount, unproven, verdict_of
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.record import GREATEST, read
from adaattn_hf.plans.store import PLAN_FILE, text_file
from adaattn_hf.plans.wording import allowed, at_most, counted, in_nats, legend, quotient, rise, share, times

REPORT_FILE = "adaattn_report.json"
PLAN_HASH = "plan_sha256"
"""Key in a report: the hash of the plan's file that it speaks of."""
MOST_ROWS, MOST_COLUMNS = 256, 128
"""Most layers and key/value heads that a picture shows."""
NAMED_COLUMNS = 5
"""Up to so many key/value heads a terminal shows the names of choices, above that one letter each."""


@dataclass(frozen=True)
class Speedups:
    """What a plan buys where it was made: how many times as fast passes (least, most) and attention are, if known."""

    whole: tuple[float, float] | None = None
    attention: float | None = None

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Self:
        """Returns what a report says; PlanError if a figure in it is none."""
        passes = report.get("whole_forward", [])
        if not isinstance(passes, list) or not all(isinstance(one, Mapping) for one in passes):
            raise PlanError(f"whole_forward is {type(passes).__name__}, expected a list of measured passes")
        ratios = [read(one.get("ratio"), Amount, "ratio") for one in passes if one.get("aimed", True)]
        prices = "price_exact_seconds", "price_plan_seconds"
        exact, price = (read(report.get(name, 0.0), Amount, name) for name in prices)
        return cls((min(ratios), max(ratios)) if ratios else None, quotient([exact], [price]))


UNMEASURED = Speedups()


def speedups_beside(plan: Path) -> Speedups:
    """Returns what the report beside a plan, its file or directory, says of it; PlanError if it is no report.

    Nothing where there is no report, or one of another plan.
    """
    directory = plan if plan.is_dir() else plan.parent
    report, file = directory / REPORT_FILE, plan / PLAN_FILE if plan.is_dir() else plan
    if not report.is_file() or not file.is_file():
        return UNMEASURED
    try:
        content = parse_json(text_file(report))
        named = content.get(PLAN_HASH) if isinstance(content, Mapping) else None
        return Speedups.of(content) if named == digest(file.read_bytes()) else UNMEASURED
    except ValueError as error:
        raise PlanError(f"{report} is no report: {error}; delete it, or calibrate again") from error


def digest(plan: bytes) -> str:
    """Returns the hash of a plan's file by which a report names it."""
    return hashlib.sha256(plan).hexdigest()


def name_of(plan: Plan) -> str:
    """Returns the name of the model that a plan was made for; its type in plans that hold no name."""
    name = plan.protocol.get(MODEL)
    return printable(name if isinstance(name, str) and name else plan.model_type)


def headline(plan: Plan, speedups: Speedups = UNMEASURED) -> str:
    """Returns what a plan was verified to cost, and what it buys: `perplexity +0.51 %, at most +0.90 %, …`."""
    rests = "" if plan.is_exact or unproven(plan) else f" ({grounds(plan)})"
    words = [cost(plan) + rests, ", ".join(_speeds(plan, speedups))]
    cache = plan.protocol.get("cache")
    part = cache.get("share") if isinstance(cache, Mapping) and not unproven(plan) else None
    if isinstance(part, int | float) and 0.0 <= part <= GREATEST:
        words.append(f"cache {part:.2g} of the bytes")
    return " · ".join(filter(None, words))


def verdict(plan: Plan, speedups: Speedups = UNMEASURED) -> str:
    """Returns the part of the headline that fits on one large line: its cost, and the speed of the whole model."""
    return " · ".join([cost(plan), *_speeds(plan, speedups)[:1]])


def _speeds(plan: Plan, speedups: Speedups) -> list[str]:
    attention = speedups.attention or (speed_of(plan) if plan.units else None)
    if plan.is_exact or (attention is None and speedups.whole is None):
        return []
    if speedups.whole is None:
        return [f"attention {times(attention)} times as fast"]
    low, high = (times(one) for one in speedups.whole)
    settings = plan.protocol.get("settings")
    of = "whole step" if isinstance(settings, Mapping) and settings.get("aim") == "step" else "whole model"
    return [f"{of} {low if low == high else f'{low} to {high}'} times as fast", f"attention {times(attention)}"]


def speed_of(plan: Plan) -> float | None:
    """Returns how many times as fast the attention of all layers is, by prices; None if not known.

    A plan holds no price of a layer that is exact: it counts as much as a planned one before it was planned.
    """
    exact, price = [unit.exact_price for unit in plan.units], [unit.price for unit in plan.units]
    rest = [one * (max(len(plan.attention_layers) / max(len(plan.layers), 1), 1.0) - 1.0) for one in exact]
    return quotient(exact + rest, price + rest)


def cost(plan: Plan) -> str:
    """Returns what a plan was verified to cost: `perplexity +0.51 %, at most +0.90 %, allowed +1 %`."""
    proof, reason = plan.verified, unproven(plan)
    if plan.is_exact and reason is None:
        number = len(plan.attention_layers)
        layers = f" ({counted(number, 'layer')})" if number else ""
        return f"every layer is exact{layers}: perplexity and speed of the model"
    if proof is None or (proof.passed and reason is not None):
        return f"not verified: the plan {reason}"
    failed = "" if proof.passed else "failed: "
    return f"{failed}perplexity {rise(proof.delta_nll)}, at most {at_most(proof.upper)}, allowed {allowed(plan.budget)}"


def grounds(plan: Plan) -> str:
    """Returns what a verdict rests on: `95 %, held-out text, two sources`."""
    number = plan.protocol.get(SOURCES)
    sources = f", {counted(number, 'source')}" if isinstance(number, int) and number > 1 else ""
    return f"{share(LEVEL)}, held-out text{sources}"


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


def print_plan(console: Console, plan: Plan, speedups: Speedups, verbose: bool, instead: str | None = None) -> None:
    """Prints a plan: in one line what it comes to, then its picture and what its labels mean.

    `verbose` prints nats, levels and versions, too; `instead` is said in place of the headline, where no plan passed.
    """
    tell(console, f"{name_of(plan)}: {instead or headline(plan, speedups)}")
    if not plan.is_exact:
        tell(console, "layers by key/value heads")
        console.print(heat_map(plan))
    tell(console, *below(plan), *(details(plan) if verbose else ()))
