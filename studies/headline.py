"""Tables of gains for the front pages, from kept results: `python -m studies.headline README.md docs/index.md`.

The figures come from `docs/results/`; nothing in the tables is typed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaattn_hf._files import write_atomically
from adaattn_hf.errors import UsageError

from .headline_frontier import frontier
from .headline_picture import Bar, draw
from .headline_plan import draw as draw_plans
from .pages import loss, percent

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
PICTURE = RESULTS.parent / "assets" / "speed.svg"
PLANS = RESULTS.parent / "assets" / "plans.svg"
MARKS = "<!-- {name}: begin -->", "<!-- {name}: end -->"

# What a line says, the cell's title, and the results that hold it.
_LINES = (
    ("documents packed into one row", "packed 8 x 512 (float32)", "bench"),
    ("prompts padded on the left", "left-padded prompts (float32)", "bench"),
    ("window of 512 at 8k", "window 512 at 8k (bfloat16)", "bench"),
    ("causal prefill, 4k", "causal 4k (float32)", "bench"),
    ("causal prefill, 4k", "causal 4k (bfloat16)", "bench"),
    ("decode, 32/8 heads, 4k", "GQA decode 4k (bfloat16)", "bench"),
    ("BERT-base, a batch of 12 to 512 tokens, whole model", "BERT base batch 12-512, prepared (float32)", "bench"),
    ("a decode step of 8 rows behind 4k, whole model", "decode step 8 x 4k, 16 heads, prepared (bfloat16)", "bench"),
    ("GPT-2 on 32 tokens, whole model", "GPT-2 small 32 tokens (float32)", "bench"),
    ("causal prefill, 16k", "causal 16k (bfloat16)", "gpu"),
    ("prompts padded on the left, half of them real", "left-padded 8 x 4k, half real (bfloat16)", "gpu"),
    ("16 documents of 1k packed into one row", "packed 16 x 1k (bfloat16)", "gpu"),
    ("window of 1k at 16k", "window 1k at 16k (bfloat16)", "gpu"),
    ("a padded batch of 512 to 12 tokens", "BERT batch 12-512 (float32)", "gpu_small"),
    ("documents packed into one row, forward and backward", "packed training (float32)", "gpu_small"),
    ("decode, 32/8 heads, 4k, 8 rows", "GQA decode 4k batch 8 (float32)", "gpu_small"),
    ("GPT-2 on 32 tokens, whole model", "GPT-2 small 32 tokens (float32)", "gpu_small"),
    ("decode, 32 padded rows behind 4k", "decode 32 x 4k, left-padded (bfloat16)", "gpu"),
    ("decode from a static cache, a quarter in use", "static cache of 16k, 4k in use, batch 8 (bfloat16)", "gpu"),
)  # fmt: skip


# What a line says, the section of gpu_plans.json, its cell, and the column that it is set beside.
_PLANS = (
    ("prefill 8k, every second head a window of 1,024", "prefill", "8k, every second head 1024+16", "sdpa"),
    ("prefill 8k, heads mixed", "prefill", "8k, mixed: 2 exact, 3 × 1024, 2 × 4096, 1 × 256", "sdpa"),
    ("prefill 32k, heads mixed", "prefill", "32k, mixed: 2 exact, 3 × 1024, 2 × 4096, 1 × 256", "sdpa"),
    ("decode, 8 rows behind 32k, every second head", "decode", "8 × 32k, every second head 1024+16", "sdpa"),
    (
        "training at 16k, window of 1,024 in all heads (stock: causal)",
        "training",
        "window 1024",
        "sdpa, causal",
    ),
)


# Reports of the plans of one seed on the same text.
_WIKITEXT = ("quality/smollm2-plan-0.1-cuda-wikitext", "quality/smollm2-plan-1-cuda-wikitext")


def block(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The table.

    Args:
        reports: Reports of `adaattn bench` by name: `bench`, `gpu`, `gpu_small`; and `gpu_plans`.

    Raises:
        UsageError: A cell was not measured.
    """
    rows = [
        "| exact attention | dtype | on | best stock | times as fast |",
        "|---|---|---|---|---|",
    ]
    for says, dtype, where, best, ratio in (*_cells(reports), *_generated(reports["gpu_plans"])):
        rows.append(f"| {says} | {dtype} | {where} | {best} | {ratio['median']:.2f} |")
    return "\n".join(rows)


Line = tuple[str, str, str, str, Mapping[str, float]]
"""What a line says, its dtype, where it was measured, the best stock implementation, and the ratio's quartiles."""


def _cells(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[Line]:
    """Cells of `adaattn bench`."""
    for says, title, name in _LINES:
        report = reports[name]
        found = [cell for cell in report["cells"] if cell["title"] == title]
        if not found or found[0]["best"] is None:
            raise UsageError(f"{name}.json: no stock implementation was measured in the cell {title!r}")
        made = report["provenance"]
        where = f"{made['cpu']}, {made['threads']} threads" if made["device"] == "cpu" else made["device"]
        dtype = title.rpartition(" (")[2][:-1]
        yield says, dtype, where, found[0]["best"], found[0]["ratio_best"]["wall"]


def _generated(report: Mapping[str, Any]) -> Iterator[Line]:
    """Generation with a static cache, exact; stock's quartiles over ours."""
    for cell in report["sections"]["generation"]:
        says = f"a token of an 8B model, {cell['cell'].removesuffix(', ms a token')}"
        (low, high), (our_low, our_high) = (cell["quartiles"][arm] for arm in ("sdpa", "exact"))
        ratio = {
            "median": cell["sdpa"] / cell["exact"],
            "quartile_25": low / our_high,
            "quartile_75": high / our_low,
        }
        yield says, "bfloat16", _device_of(report, "generation"), "sdpa", ratio


def picture(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The same cells as bars, in SVG."""
    bars = []
    for says, dtype, where, _best, ratio in (*_cells(reports), *_generated(reports["gpu_plans"])):
        short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        spread = ratio["quartile_25"], ratio["quartile_75"]
        bars.append(Bar(f"{says} ({short})", where, "threads" not in where, ratio["median"], *spread))
    return draw(bars, "Exact attention: times as fast as the fastest stock implementation")


def plans_picture(study: Mapping[str, Any]) -> str:
    """The plans of the first seed, one per budget, in SVG."""
    first = [record for record in study["seeds"] if record["seed"] == 0]
    return draw_plans(first, "What a loss budget buys: two plans of SmolLM2-135M for up to 8,192 tokens")


def figures(reports: Mapping[str, Any]) -> str:
    """All tables; the first, whose cells the picture shows, is folded away."""
    folded = (
        f'<details markdown="1">\n<summary>The picture as a table</summary>\n\n{block(reports)}\n\n</details>'
    )
    tables = (
        folded,
        budget_block(reports["budget"]),
        device_budget_block(reports["budget_cuda"]),
        wikitext_block([reports[name] for name in _WIKITEXT]),
        caches_block(reports["cache_plans"]),
        generation_block(reports["gpu_plans"]),
        steps_block(reports["gpu_plans"]),
        plans_block(reports["gpu_plans"]),
    )
    return "\n\n".join(tables)


def wikitext_block(reports: Sequence[Mapping[str, Any]]) -> str:
    """The table of what plans lose on a text that decided nothing, from reports of `adaattn eval`."""
    rows = []
    for report in reports:
        stock, planned = (arm["perplexity"] for arm in report["quality"]["arms"])
        (found,) = report["quality"]["comparisons"]
        budget = next(plan["budget"] for plan in report["plans"] if plan)
        rows.append(
            f"| {percent(budget)} | {stock:.4f} | {planned:.4f} | {loss(found['delta_nll']['mean'])} | "
            f"{loss(found['delta_nll']['upper'])} of {loss(budget)} |"
        )
    told = f"{reports[0]['quality']['arms'][0]['tokens']:,} tokens"
    where = reports[0]["provenance"]["device"]
    return "\n".join([
        f"| loss budget, the whole WikiText-2 test set ({told}), {where} | stock perplexity | with the plan | Δnll "
        "| at most (95 %) |",
        "|---|---|---|---|---|",
        *rows,
    ])  # fmt: skip


def caches_block(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of what caches under a budget hold, see `studies.cache_plans`."""
    rows = [
        f"| {percent(one['budget'])} | {one['bytes_per_token']:,.0f} of {one['dynamic']:,} | {one['smaller']:.2f} | "
        f"{loss(one['cache']['verified']['upper'])} of {loss(one['budget'])} |"
        for one in records
    ]
    model = records[0]["name"].partition("-Instruct")[0]
    return "\n".join([
        f"| loss budget, key/value cache of {model} at {records[0]['tokens']:,} tokens | bytes per token | times "
        "smaller than 16 bits | Δnll over the cache, at most |",
        "|---|---|---|---|",
        *rows,
    ])  # fmt: skip


def generation_block(report: Mapping[str, Any]) -> str:
    """The table of generation with a static cache, as Transformers compiles it on a CUDA device."""
    cells = report["sections"]["generation"]
    arms = {"exact": "exact AdaAttn"}
    arms |= {f"plan {budget}": f"windows as in SmolLM2's plan of {budget}" for budget in ("0.1 %", "1 %")}
    device = _device_of(report, "generation")
    rows = [
        f"| `generate` with a static cache, LLaMA-8B's shape, bfloat16, {device} | stock sdpa "
        f"| {' | '.join(arms.values())} | exact: times as fast | of 1 %: times as fast |",
        "|---" * (4 + len(arms)) + "|",
    ]
    for cell in cells:
        says = cell["cell"].removesuffix(", ms a token")
        times = " | ".join(f"{cell[arm]:.1f} ms" for arm in ("sdpa", *arms))
        ratios = " | ".join(f"{cell['sdpa'] / cell[arm]:.2f}" for arm in ("exact", "plan 1 %"))
        rows.append(f"| a token behind {says} | {times} | {ratios} |")
    return "\n".join(rows)


def _device_of(report: Mapping[str, Any], section: str) -> str:
    """The device that a section was measured on."""
    found: str = report["settings"].get(section, report["setting"])["device"]
    return found


def steps_block(report: Mapping[str, Any]) -> str:
    """The table of decode steps of a whole model on a CUDA device, exact; stock with either of its caches."""
    device = _device_of(report, "model")
    rows = [
        f"| one decode step, not compiled, of a model of LLaMA-8B's shape, bfloat16, {device} | stock sdpa, "
        "`DynamicCache` | stock sdpa, `StaticCache` | exact AdaAttn, `AdaAttnCache` "
        "| times as fast as the better of both |",
        "|---|---|---|---|---|",
    ]
    for cell in report["sections"]["model"]:
        if not cell["cell"].startswith("decode "):
            continue
        says = cell["cell"].removeprefix("decode ").removesuffix(", ms a step")
        stock = cell["sdpa"], cell["sdpa, StaticCache"]
        times = " | ".join(f"{milliseconds:.1f} ms" for milliseconds in (*stock, cell["exact"]))
        rows.append(f"| {says} tokens | {times} | {min(stock) / cell['exact']:.2f} |")
    return "\n".join(rows)


def plans_block(report: Mapping[str, Any]) -> str:
    """The table of what windows per head, as plans have them, cost on a CUDA device.

    Raises:
        UsageError: A cell was not measured.
    """
    devices = dict.fromkeys(_device_of(report, section) for _, section, *_ in _PLANS)
    rows = [
        f"| windows per head, bfloat16, {' and '.join(devices)} | times stock sdpa, with flash-attn 4 "
        "| times stock sdpa, Triton alone |",
        "|---|---|---|",
    ]
    for says, section, title, beside in _PLANS:
        cells = [cell for cell in report["sections"][section] if cell["cell"] == title]
        if not cells:
            raise UsageError(f"gpu_plans.json: {title!r} was not measured in the section {section!r}")
        ratios = [
            f"{cells[0][beside] / cells[0][name]:.2f}" if name in cells[0] else "–"
            for name in ("fa4", "triton")
        ]
        rows.append(f"| {says} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def budget_block(study: Mapping[str, Any]) -> str:
    """The table of what a loss budget buys, at the longest length that was timed."""
    times = study["speed"]["attention"]
    length = max((shape for shape in times if shape.isdigit()), key=int)
    seconds = {name: entry["seconds"] for name, entry in times[length].items()}
    whole = max((shape for shape in study["speed"]["model"] if shape.isdigit()), key=int)
    passes = {name: entry["seconds"] for name, entry in study["speed"]["model"][whole].items()}
    model = study["speed"]["settings"]["model"].partition("-Instruct")[0]
    rows = [
        f"| loss budget, {model} at {length} tokens | seeds within budget (held-out source) "
        "| largest bound of Δnll | attention: speed-up vs SDPA | attention: speed-up vs exact AdaAttn "
        f"| whole prefill at {whole} tokens: speed-up vs exact AdaAttn |",
        "|---|---|---|---|---|---|",
    ]
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        name = percent(budget)
        rows.append(
            f"| {name} | {_proved(study, budget)} | "
            f"{seconds['stock sdpa'] / seconds[name]:.2f} | {seconds['exact'] / seconds[name]:.2f} | "
            f"{passes['exact'] / passes[name]:.2f} |"
        )
    return "\n".join(rows)


def _proved(study: Mapping[str, Any], budget: float) -> str:
    """Cells: how many seeds met a budget, and the largest bound of theirs."""
    own = [record for record in study["seeds"] if record["budget"] == budget]
    met = [record for record in own if record["met"]]
    upper = max(verdict["upper"] for record in met for verdict in record["report"]["verdicts"])
    return f"{len(met)} of {len(own)} | {loss(upper)} of {loss(budget)}"


def device_budget_block(study: Mapping[str, Any]) -> str:
    """The table of what a loss budget buys on a GPU, for one sequence and for more where so many were timed at once."""
    speed = study["speed"]
    length = max((shape for shape in speed["attention"] if shape.isdigit()), key=int)
    shapes = [length, *(shape for shape in speed["attention"] if shape.endswith(f" x {length}"))]
    model = speed["settings"]["model"].partition("-Instruct")[0]
    later = speed.get("renewed", {})
    devices = dict.fromkeys(
        later.get(f"{level}, {shape}", speed)["provenance"]["device"]
        for level in ("attention", "model")
        for shape in shapes
        if shape in speed.get(level, {})
    )
    told = "".join(
        f" | {level}: speed-up vs {name}"
        for level in ("attention", "whole prefill")
        for name in ("SDPA", "exact AdaAttn")
    )
    rows = [
        f"| loss budget, {model} at {length} tokens, {speed['settings']['dtype']}, {' and '.join(devices)} "
        f"| seeds within budget | largest bound of Δnll | sequences at once{told} |",
        "|---" * 8 + "|",
    ]
    for budget in sorted({record["budget"] for record in study["seeds"]}):
        arm = f"plan-{percent(budget)}".replace(" ", "")
        for shape in shapes:
            # a study may have timed attention alone
            timed = [speed.get(level, {}).get(shape) for level in ("attention", "model")]
            ratios = [
                f"{arms[base]['seconds'] / arms[arm]['seconds']:.2f}" if arms else "–"
                for arms in timed
                for base in ("stock sdpa", "exact")
            ]
            count = shape.partition(" x ")[0] if " x " in shape else "1"
            rows.append(f"| {percent(budget)} | {_proved(study, budget)} | {count} | {' | '.join(ratios)} |")
    return "\n".join(rows)


def rewrite(page: str, written: str, name: str = "figures") -> str:
    """The page with this text between the marks of a name.

    Raises:
        UsageError: The page has no such marks.
    """
    first, last = (mark.format(name=name) for mark in MARKS)
    head, begin, rest = page.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise UsageError(f"got a page without {first} and {last}")
    return f"{head}{begin}\n{written}\n{end}{tail}"


def kept_reports(results: Path = RESULTS) -> dict[str, Any]:
    """The reports in a directory of results."""
    return {
        name: json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        for name in (
            "bench",
            "gpu",
            "gpu_small",
            "budget",
            "budget_cuda",
            "gpu_plans",
            "cache",
            "cache_plans",
            *_WIKITEXT,
        )
    }


def main(*paths: str) -> None:
    """Rewrites pages, and the pictures that they show."""
    reports = kept_reports()
    table = figures(reports)
    write_atomically(PICTURE, picture(reports).encode())
    write_atomically(PLANS, plans_picture(reports["budget"]).encode())
    for page in map(Path, paths):
        text = rewrite(page.read_text(encoding="utf-8"), table)
        if MARKS[0].format(name="frontier") in text:
            text = rewrite(text, frontier(reports), "frontier")
        write_atomically(page, text.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
