"""What pages say of `docs/results/front_*.json`: the README's tables, its picture, and every arm in docs/figures.md.

The baseline of a figure is the fastest arm of stock in its cell, and in tables of gains also its best string. A cell
that lacks an arm of the protocol without a reason, rounds, a commit, a machine, a date or its conditions is refused.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaattn_hf.errors import UsageError
from adaattn_hf.eval.provenance import processor

from ..headline_picture import Bar
from ..pages import commit, table

STOCK = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_4")
CUTTING = "sorted into four", "each text alone", "unpadded"
CUTS = tuple(f"{name}, {cut}" for name in ("sdpa", "flash_attention_2") for cut in CUTTING[:2])
GROWN = tuple(f"{name}, DynamicCache" for name in STOCK)
STEP = (*GROWN, "sdpa, StaticCache", "eager, StaticCache")
CAPTURED = ("sdpa, StaticCache, captured", "flash_attention_2, StaticCache, captured")
PROTOCOL = {
    "query": (*STOCK, *CUTS), "unsorted": (*STOCK, *CUTS), "sorted": (*STOCK, *CUTS),
    "gpu encoder": (*STOCK, *CUTS), "prompt": (*GROWN, "sdpa, StaticCache"),
    "gpu prompt": (*GROWN, "sdpa, StaticCache"), "step": STEP, "gpu step": (*STEP, *CAPTURED),
    "gpu requests": STOCK, "gpu training": STOCK,
}  # fmt: skip
TEXTS = ("gpu reranker", "gpu embedder", "gpu modernbert", "gpu long encoder")
PROTOCOL |= dict.fromkeys(TEXTS, (*STOCK, *CUTS, "flash_attention_2, unpadded"))
"""Stock's arms of a cell by the beginning of its name: each is timed, or has the reason why it is not."""
LEAST, BUSY = 15, 0.7
"""Rounds of a figure; the share of a call below which a GPU that works on it is said to wait for the host."""


@dataclass(frozen=True)
class Row:
    """A row of the README: its cell, what a reader does and the page of docs/guides about it, and its bar, if any.

    Arms whose names hold `without` are left out on both sides; `note` is what the row is then.
    """

    cell: str
    job: tuple[str, str]
    bar: str = ""
    without: str = "\0"
    note: str = ""


ENCODERS, PROMPTS = ("Encoders", "encoders.md"), ("Prompts", "long-prompts.md")
SERVED = "Many requests", "cpu-servers.md#continuous-batching"
CPU_STEP, GPU_STEP = ("Generation", "cpu-servers.md"), ("Generation", "cuda.md#generation")
ROWS = {
    "cpu": (
        Row("unsorted bfloat16", ENCODERS, "BERT-base, unsorted texts"),
        Row("unsorted float32", ENCODERS),
        Row("sorted bfloat16", ENCODERS),
        Row("query bfloat16", ENCODERS, "BERT-base, one short text"),
        Row("prompt 4k", PROMPTS, "Prompt of 4k tokens, 0.5B"),
        Row("prompt 128", PROMPTS),
        Row("step 16k", CPU_STEP, "A token behind 16k, 0.5B"),
    ),
    "gpu": (
        Row("gpu encoder large 256", ENCODERS, "BERT-large, 256 unsorted texts"),
        Row("gpu encoder base 32", ENCODERS),
        Row("gpu reranker 256", ENCODERS),
        Row("gpu prompt 8 x 4k left-padded", PROMPTS, "Left-padded prompts of 4k, 1.5B"),
        Row("gpu prompt 16k", PROMPTS),
        Row("gpu prompt 2k", PROMPTS),
        Row("gpu step 16k", GPU_STEP, "A captured step behind 16k, 1.5B", "prepare", "captured"),
        Row("gpu step 16k", GPU_STEP, without="captured", note="no step captured"),
        Row("gpu requests 8", SERVED, "8 requests of 2k, a step, 1.5B"),
        Row("gpu training", ("Training", "training.md")),
    ),
}  # fmt: skip
"""Rows of the README by machine; each is in the report of that machine."""

Cells = Mapping[str, Mapping[str, Any]]


def checked(cells: Cells) -> Cells:
    """The cells of a report; UsageError where one lacks what a figure needs, or they are of several machines.

    Where sources differ, each cell names its commit: all arms of one ran in one process.
    """
    places = set()
    for name, cell in cells.items():
        made, arms = cell["provenance"], cell["arms"]
        needed = {"commit": made.get("commit"), "device": made.get("device"), "date": cell.get("date")}
        needed |= {key: cell["conditions"].get(key) for key in ("timed", "dtype")}
        needed |= {package: made["versions"].get(package) for package in ("torch", "transformers")}
        place = "threads" if made["device"] == "cpu" else "driver"
        needed[place] = made.get(place)
        if lacking := [key for key, value in needed.items() if not value]:
            raise UsageError(f"{name}: the report has no {', '.join(lacking)}; measure it again")
        kind = max((kind for kind in PROTOCOL if name.startswith(kind)), key=len)
        ours = [arm for arm in arms if arm.startswith("adaattn")]
        for arm in (*PROTOCOL[kind], *ours):
            own = arms.get(arm, {})
            if not own.get("absent") and len(own.get("wall", ())) < LEAST:
                raise UsageError(f"{name}: got no {LEAST} rounds of {arm!r} and no reason why; measure it again")
            if "wall" in own and made["device"] == "cpu" and len(own.get("process", ())) < LEAST:
                raise UsageError(f"{name}: got no processor time of {arm!r}; measure it again")
        if not any("wall" in arms[arm] for arm in ours):
            raise UsageError(f"{name}: got no arm of adaattn that ran")
        others = {package: at for package, at in made["versions"].items() if package != "adaattn-hf"}  # the commit says
        places.add(str([*(made[key] for key in ("device", "cpu", "threads", "driver")), others]))
    if len(places) > 1:
        raise UsageError(f"got cells of {len(places)} machines or versions in one report: {', '.join(places)}")
    return cells


def seconds(cell: Mapping[str, Any], without: str = "\0") -> dict[str, list[float]]:
    """Of every arm that ran, fastest first."""
    found = {name: arm["wall"] for name, arm in cell["arms"].items() if "wall" in arm and without not in name}
    return dict(sorted(found.items(), key=lambda item: statistics.median(item[1])))


def stock_and_ours(
    cell: Mapping[str, Any], without: str = "\0", left_out: tuple[str, ...] = ()
) -> tuple[str, str | None, str | None]:
    """The fastest arm of stock, ours by the string alone and by `prepare`; no plans or names that end in `left_out`."""
    names = [name for name in seconds(cell, without) if "plan" not in name and not name.endswith(left_out)]
    own = [name for name in names if name.startswith("adaattn")]
    alone, prepared = (next((name for name in own if ("prepare" in name) is asked), None) for asked in (False, True))
    return next(name for name in names if name not in own), alone, prepared


def speedup(cell: Mapping[str, Any], stock: str, ours: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile over rounds of stock's time over ours."""
    pairs = zip(cell["arms"][stock]["wall"], cell["arms"][ours]["wall"], strict=True)
    low, middle, high = statistics.quantiles([theirs / own for theirs, own in pairs], n=4)
    return low, middle, high


def times(ratio: float) -> str:
    """A ratio with as many digits as a reader keeps."""
    return f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def waits(arm: Mapping[str, Any]) -> bool:
    """Whether a GPU waits for the host in an arm."""
    return "kernels" in arm and arm["kernels"] < BUSY * statistics.median(arm["wall"])


def _entry(cell: Mapping[str, Any], stock: str, ours: str | None) -> str:
    if ours is None:
        return "–"
    low, middle, high = speedup(cell, stock, ours)
    shown = f"**{times(middle)}**" if low > 1 else times(middle)
    return f"{shown} ({times(low)}–{times(high)})" + "¹" * waits(cell["arms"][ours])


def _says(cell: Mapping[str, Any], *more: str) -> str:
    """What ran, its padding and further conditions, in the words of a row."""
    real = cell["conditions"].get("real tokens", 1.0)
    return ", ".join(filter(None, (cell["says"], f"{1 - real:.0%} padding" * (real < 0.99), *more)))


def gains(cells: Cells, rows: Sequence[Row], guides: str = "docs/guides/") -> str:
    """A table of one machine, slower rows beside the faster ones; links go to `guides`; UsageError for no cell.

    Where stock is faster on texts that are cut first, that is a second row. A dtype of all rows stands in the head.
    """
    if lacking := [row.cell for row in rows if row.cell not in cells]:
        raise UsageError(f"{lacking[0]}: not measured; python -m studies.front FILE '{lacking[0]}'")
    lines, dtypes = [], {cells[row.cell]["conditions"]["dtype"] for row in rows}
    for row in rows:
        told = _says(cell := cells[row.cell], cell["conditions"]["dtype"] * (len(dtypes) > 1), row.note)
        says = f"[{row.job[0]}]({guides}{row.job[1]}): {told}".replace("'s shape, random weights", "²")
        for stock, *ours in dict.fromkeys(stock_and_ours(cell, row.without, cuts) for cuts in (CUTTING, ())):
            best = f"{stock.replace('flash_attention_2', 'flash-attn 2')}{'¹' * waits(cell['arms'][stock])}"
            lines.append((says, best, *(_entry(cell, stock, own) for own in ours)))
            says = "– the same texts"
    head = (", ".join([where(cells), *(dtypes if len(dtypes) == 1 else ())]), "Stock", "String alone", "With `prepare`")
    return "\n".join(table(head, lines)[:-1])


def of_texts(cells: Cells) -> str:
    """The table of rerankers and embedding models, then all their arms, for docs/figures.md."""
    own = {name: cell for name, cell in cells.items() if name.startswith(TEXTS)}
    if not own:
        return "Not measured yet."
    return gains(own, [Row(name, ENCODERS) for name in own], "guides/") + "\n\n" + every_arm(own)


def where(cells: Cells) -> str:
    """The machine of a report, by the name that people know."""
    made = next(iter(cells.values()))["provenance"]
    if made["device"] != "cpu":
        return str(made["device"]).partition(" 80GB")[0]
    return f"{processor(made).replace('(R)', '').replace(' Processor', '')}, {made['threads']} threads"


def traced(cells: Cells) -> str:
    """Machine, driver, versions, commit, dates and rounds of a report."""
    made = next(iter(cells.values()))["provenance"]
    names = {"torch": "torch", "transformers": "Transformers", "flash-attn": "flash-attn"}
    versions = [f"{said} {made['versions'][name]}" for name, said in names.items() if name in made["versions"]]
    dates = sorted({cell["date"] for cell in cells.values()})
    rounds = min(len(arm["wall"]) for cell in cells.values() for arm in cell["arms"].values() if "wall" in arm)
    parts = [where(cells), *([made["driver"]] if made["driver"] else []), *versions]
    parts += [f"commit {one}" for one in sorted({commit(cell["provenance"]) for cell in cells.values()})]
    return ", ".join([*parts, " to ".join(dict.fromkeys((dates[0], dates[-1]))), f"{rounds} rounds"]) + "."


def bars(cells: Cells, rows: Sequence[Row]) -> Iterator[Bar]:
    """The rows of a machine that the picture shows, with what each is compared with."""
    for row in rows:
        if row.bar:
            cell = cells[row.cell]
            stock, *ours = stock_and_ours(cell, row.without)
            middle = max(speedup(cell, stock, own)[1] for own in ours if own is not None)
            yield Bar(row.bar, f"beside {stock}", cell["provenance"]["device"] != "cpu", middle, times(middle))


def every_arm(cells: Cells) -> str:
    """All arms of all cells, for docs/figures.md."""
    on_cpu = next(iter(cells.values()))["provenance"]["device"] == "cpu"
    lines, several = [traced(cells), ""], len({cell["provenance"].get("source") for cell in cells.values()}) > 1
    for cell in cells.values():
        stock = stock_and_ours(cell)[0]
        about, told = cell["conditions"], ("prompt or step", "room", "engine", "plan")
        more = [f"{key}: {value}" for key, value in about.items() if key in told]
        rows = []
        for name, own in seconds(cell).items():
            low, middle, high = (1e3 * part for part in statistics.quantiles(own, n=4))
            arm = cell["arms"][name]
            beside = f"{arm['kernels'] / statistics.median(own):.0%}" if "kernels" in arm else "–"
            beside = f"{1e3 * statistics.median(arm['process']):.3g}" if on_cpu else beside
            rows.append((f"**{name}**" if name == stock else name, f"{middle:.4g} ({low:.4g}–{high:.4g})", beside,
                         times(speedup(cell, stock, name)[1]),
                         *([f"{arm['peak'] / 2**20:,.0f}"] if "peak" in arm else [])))  # fmt: skip
        more += [f"commit {commit(cell['provenance'])}"] if several else []
        lines += ["; ".join([f"**{_says(cell, about['dtype'])}** ({about['timed']})", *more]), ""]
        head = ("arm", "ms (quartiles)", "processor, ms" if on_cpu else "GPU busy", "speedup over best stock",
                "memory of a call, MiB")[: len(rows[0])]  # fmt: skip
        lines += table(head, rows)
        reasons: dict[str, list[str]] = {}
        for name, arm in cell["arms"].items():
            if arm.get("absent"):
                reasons.setdefault(arm["absent"], []).append(name)
        lines += ["Not timed: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()) + ".", ""]
    return "\n".join(lines[:-1])
