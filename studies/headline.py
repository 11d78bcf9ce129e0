"""The README's figures and picture, and the tables of docs/figures.md and comparison.md: `python -m studies.headline`.

All come from `docs/results/`; none is typed. A figure without a commit and a machine in its report is refused.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaattn_hf._files import write_atomically
from adaattn_hf.errors import UsageError

from .budget.report import elsewhere, inside
from .headline_frontier import frontier
from .headline_peers import peers
from .headline_picture import Bar, badge, draw
from .headline_tables import tables
from .pages import commit, machine, percent, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
ASSETS = ROOT / "docs" / "assets"
README, FIGURES, COMPARISON = ROOT / "README.md", ROOT / "docs" / "figures.md", ROOT / "docs" / "comparison.md"
H100 = "NVIDIA-H100-80GB-HBM3"
MARKS = "<!-- {name}: begin -->", "<!-- {name}: end -->"
REPORTS = ("batching", "bench", "budget", "budget_cuda", "cache", "cache_plans", "gpu", "gpu_plans", "real_models")

Reports = Mapping[str, Any]
Measured = tuple[float, str, Mapping[str, Any]]
"""The speedup, over what, and the provenance of both."""


@dataclass(frozen=True)
class Case:
    """What the README and its picture show of one thing that people run.

    Attributes:
        says: What ran.
        whole: Whether a whole model was timed, or only attention.
        dtype: Of the tensors.
        measured: Finds it in the reports.
    """

    says: str
    whole: bool
    dtype: str
    measured: Callable[[Reports], Measured]


def bench(title: str, name: str = "bench", stock: str | None = None) -> Callable[[Reports], Measured]:
    """A case of a report of `adaattn bench`, compared with one stock implementation, by default the case's fastest."""

    def find(reports: Reports) -> Measured:
        cells = [cell for cell in reports[name]["cells"] if cell["title"] == title]
        if not cells or cells[0]["best"] is None:
            raise UsageError(f"{name}.json: no stock implementation was measured in the cell {title!r}")
        made = {**reports[name]["provenance"], "commit": cells[0]["commit"]}
        own = cells[0]["ratio_best"] if stock is None else cells[0]["ratios"][stock]
        return own["wall"]["median"], stock or cells[0]["best"], made

    return find


def prompt(arm: str, length: str) -> Callable[[Reports], Measured]:
    """A whole prefill of the study of budgets, on a CPU."""

    def find(reports: Reports) -> Measured:
        speed = reports["budget"]["speed"]
        seconds = {name: entry["seconds"] for name, entry in speed["model"][length].items()}
        return seconds["stock sdpa"] / seconds[arm], "sdpa", speed["provenance"]

    return find


def real(place: str, part: str, model: str, length: int) -> Callable[[Reports], Measured]:
    """A prompt (`passes`) or a step after it (`steps 1`) of the study of real models, on a device."""

    def find(reports: Reports) -> Measured:
        (own,) = [
            one for one in reports["real_models"][place]["speed"] if (one["model"], one["length"]) == (model, length)
        ]
        return own[part]["stock"]["median"] / own[part]["exact"]["median"], "sdpa", own["provenance"]

    return find


def batched(length: int) -> Callable[[Reports], Measured]:
    """Tokens per second of requests that are served together, of the study of continuous batching."""

    def find(reports: Reports) -> Measured:
        report = reports["batching"]
        ours, stock = (
            statistics.median(
                cell["tokens/s"] for cell in report["cells"] if cell["cell"].startswith(f"{arm}, {length}, ")
            )
            for arm in ("adaattn", "sdpa")
        )
        return ours / stock, "sdpa", report["setting"]

    return find


PADDED = Case("Padded batch, BERT-base", True, "float32", bench("BERT base batch 12-512, prepared (float32)"))
OF_PACKED = "packed training 16 x 1k (bfloat16)"
PACKED = Case("Packed documents, forward and backward", False, "bfloat16", bench(OF_PACKED, "gpu"))
PACKED_OVER_SDPA = replace(PACKED, measured=bench(OF_PACKED, "gpu", "sdpa"))
STATIC = Case(
    "One token after a 32k prompt, static cache, Qwen2.5-Coder-1.5B", True, "bfloat16",
    real(H100, "steps 1", "qwen15", 32_768),
)  # fmt: skip
BATCHED = Case("Eight requests of 8k tokens at once, 8B", True, "bfloat16", batched(8192))
LONG = Case("Prompt of 8k tokens, SmolLM2-135M", True, "float32", prompt("exact", "8192"))
PLANNED = Case("The same, if perplexity may rise by 0.1 %", True, "float32", prompt("0.1 %", "8192"))
WRITTEN = Case(
    "One token after a 4k prompt, Qwen2.5-Coder-0.5B", True, "bfloat16", real("cpu", "steps 1", "qwen05", 4096)
)
SHOWN = (
    PADDED, PACKED, STATIC, BATCHED, WRITTEN, LONG, PLANNED,
    Case("Short prompt, GPT-2, 32 tokens", True, "float32", bench("GPT-2 small 32 tokens (float32)")),
)  # fmt: skip
"""The bars of the picture, at most eight."""
GAINS = (
    (
        "encoders, embedding models and rerankers, on padded batches",
        [PADDED],
        "**{}** (whole BERT-base)",
        "encoders.md",
    ),
    (
        "training on packed documents",
        [PACKED, PACKED_OVER_SDPA],
        "**{}** (attention only; {} over `sdpa`)",
        "packing.md",
    ),
    (
        "generation with a static cache",
        [STATIC],
        "**{}** (whole 1.5B model, each token after a 32k prompt)",
        "cuda.md#generation",
    ),
    (
        "many requests at once",
        [BATCHED],
        "**{}** (whole 8B model, 8 requests of 8k tokens)",
        "cpu-servers.md#continuous-batching",
    ),
    (
        "a language model on a CPU",
        [WRITTEN],
        "**{}** (whole 0.5B model, each token after a 4k prompt)",
        "cpu-servers.md",
    ),
    (
        "long prompts on a CPU",
        [LONG, PLANNED],
        "**{}** exact; **{}** if perplexity may rise by 0.1 % (whole 135M model, 8k tokens)",
        "long-prompts.md",
    ),
)
"""Rows of the README's table: what people run, what was measured, the words around the figures, and the guide."""


def traced(says: str, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """The provenance of what is shown.

    Raises:
        UsageError: It does not say at which commit, or where.
    """
    if not made.get("commit") or not made.get("device"):
        raise UsageError(f"{says}: the report names no commit or device; measure it again")
    return made


def found(case: Case, reports: Reports) -> Measured:
    """What was measured of a case, with its provenance."""
    ratio, stock, made = case.measured(reports)
    return ratio, stock, traced(case.says, made)


def times(ratio: float) -> str:
    """A ratio with as many digits as a reader keeps."""
    return f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def gains(reports: Reports) -> str:
    """The README's table of who gains, one row for each kind of reader."""
    rows = []
    for you, cases, words, guide in GAINS:
        measured = [found(case, reports) for case in cases]
        figures = words.format(*(times(ratio) for ratio, _, _ in measured))
        rows.append((f"[{you}](docs/guides/{guide})", figures, machine(measured[0][2])))
    return "\n".join(table(("You run", "Speedup over stock", "Measured on"), rows)[:-1])


def kept(reports: Reports) -> str:
    """The README's table of how many calibrations found a plan, and which plans keep their budget on unseen text."""
    rows = []
    for model, budget, own in studied(reports):
        rows.append((model, budget, *(f"{sum(kept)} of {len(own)}" for kept in zip(*own, strict=True))))
    head = (
        "Model", "Budget", "Calibrations that found a plan", "Of these, on unseen text: measured rise within budget",
        "95 % upper bound within budget, too",
    )  # fmt: skip
    return "\n".join(table(head, rows)[:-1])


def studied(reports: Reports) -> Iterator[tuple[str, str, list[tuple[bool, bool, bool]]]]:
    """By model and budget, of each calibration whether it found a plan, and whether mean and bound are within it."""
    seeds = reports["budget"]["seeds"]
    for record in seeds:
        traced(f"seed {record['seed']} of budget.json", record["provenance"])
    for budget in sorted({record["budget"] for record in seeds}):
        own = [record for record in seeds if record["budget"] == budget]
        yield "SmolLM2-135M", percent(budget), [(one["met"], elsewhere(one) <= budget, inside(one)) for one in own]
    plans = [row for row in reports["real_models"][H100]["rows"] if row["model"].startswith("qwen")]
    for budget in sorted({row["nats"] for row in plans}):
        own = [row for row in plans if row["nats"] == budget]
        found = [
            (row["met"], *(row["met"] and row["third"][of] <= budget for of in ("delta_nll", "upper"))) for row in own
        ]
        yield "Qwen2.5-Coder-0.5B and 1.5B", percent(budget), found


def picture(reports: Reports) -> str:
    """The README's picture, in SVG."""
    bars = []
    for case in SHOWN:
        ratio, _, made = found(case, reports)
        bars.append(Bar(case.says, machine(made), case.whole, ratio, times(ratio)))
    return draw(bars, "Speedup over stock attention")


def cases(reports: Reports) -> str:
    """The picture as a table."""
    rows = []
    for case in SHOWN:
        ratio, stock, made = found(case, reports)
        level = "whole model" if case.whole else "attention only"
        rows.append((case.says, level, case.dtype, machine(made), stock, f"{ratio:.2f}", commit(made)))
    head = ("Case", "timed", "dtype", "machine", "stock", "speedup", "commit")
    return "\n".join(table(head, rows)[:-1])


def supported(pyproject: str) -> list[tuple[str, str]]:
    """What the badges say: versions and licence, as pyproject.toml has them."""
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)
    dependencies = pyproject.partition("\ndependencies = [")[2].partition("]")[0]
    (torch,) = re.findall(r'"torch>=([\d.]+)"', dependencies)
    ((low, high),) = re.findall(r'"transformers>=([\d.]+),<5\.(\d+)"', dependencies)
    (licence,) = re.findall(r'^license = "(.*)"', pyproject, re.MULTILINE)
    return [
        ("Python", f"{pythons[0]}–{pythons[-1]}"),
        ("PyTorch", f"≥ {torch}"),
        ("Transformers", f"{low}–5.{int(high) - 1}"),
        ("licence", licence),
    ]


def badges(named: Sequence[tuple[str, str]]) -> str:
    """The README's line of badges."""
    links = (f"[![{name} {value}](docs/assets/badge_{name.lower()}.svg)](docs/support.md)" for name, value in named)
    return "\n".join(links)


def rewrite(page: str, written: Mapping[str, str]) -> str:
    """The page with each text between the marks of its name.

    Raises:
        UsageError: The page lacks marks.
    """
    for name, text in written.items():
        first, last = (mark.format(name=name) for mark in MARKS)
        head, begin, rest = page.partition(first)
        _, end, tail = rest.partition(last)
        if not begin or not end:
            raise UsageError(f"got a page without {first} and {last}")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def kept_reports(names: Sequence[str] = REPORTS) -> dict[str, Any]:
    """The reports in docs/results by name."""
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def written(reports: Reports) -> dict[Path, str]:
    """Every file that holds figures, and what it holds."""
    named = supported((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    front = {"badges": badges(named), "gains": gains(reports), "kept": kept(reports)}
    blocks = {"cases": cases(reports), **tables(reports), "frontier": frontier(reports)}
    return {
        README: rewrite(README.read_text(encoding="utf-8"), front),
        FIGURES: rewrite(FIGURES.read_text(encoding="utf-8"), blocks),
        COMPARISON: rewrite(COMPARISON.read_text(encoding="utf-8"), {"peers": peers(reports)}),
        ASSETS / "speed.svg": picture(reports),
        **{ASSETS / f"badge_{name.lower()}.svg": badge(name, value) for name, value in named},
    }


if __name__ == "__main__":
    for path, text in written(kept_reports()).items():
        write_atomically(path, text.encode())
