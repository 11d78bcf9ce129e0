"""How the pages of docs/results write tables, budgets, machines and commits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, and an empty one."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def percent(budget: float) -> str:
    """Returns a budget as a rise of the perplexity."""
    return f"{100 * math.expm1(budget):.3g} %"


def machine(made: Mapping[str, Any]) -> str:
    """Returns where something was measured, by the name that people know: a GPU, or a processor and its threads."""
    if made["device"] != "cpu":
        return str(made["device"]).partition(" 80GB")[0]
    threads = made["threads"]
    cpu = made["cpu"].replace("(R)", "").removesuffix(" Processor")
    return f"{cpu}, {threads} thread{'s' * (threads != 1)}"


def commit(made: Mapping[str, Any]) -> str:
    """Returns the commit of a measurement, with `+dirty` where files differed, or that nobody wrote it down."""
    digits, *dirty = (made.get("commit") or "not recorded").partition("+")
    return "".join([digits[:9], *dirty]) if made.get("commit") else digits
