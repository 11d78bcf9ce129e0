"""`adaattn eval` without a model: the three models in the package, on the text in the package, offline.

Each is measured in float32 and in bfloat16, with eager attention as the anchor. In float32 the bar is a
relative change of perplexity of at most 1e-5. In bfloat16 stock attention differs from itself: eager and sdpa
are two roundings of one function. There the mean difference from stock has to lie within what eager's
difference from stock may be (the farther end of its 95 % interval).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.table import Table
from transformers.utils import logging

from adaattn_hf.patches.checkpoint import load

from . import corpora, runner
from .demo import DEMO_MODELS, demo_model_path, heldout_pages, lastword_items
from .settings import Settings

DTYPES = ("float32", "bfloat16")
MAX_RELATIVE_CHANGE = 1e-5
MASK_FRACTION = 0.004
"""Share of the tokens that the masked LM is scored on: each costs a forward pass."""
BATCH_SIZE = 4
"""Windows per forward pass, unless another number than 1 is asked for."""


def runs(settings: Settings, dtype: str | None, device: str | None) -> Iterator[runner.Run]:
    """Yields each packaged model in each dtype, or the one asked for, over each text."""
    logging.disable_progress_bar()  # six small models load in no time
    texts = (  # the short one first: it soon has a result
        corpora.lastword_corpus(
            [item["text"] for item in lastword_items()], "last-word passages in the package", "last-word"
        ),
        corpora.wikitext_corpus(heldout_pages(), "held-out pages in the package", "pages"),
    )
    for name in DEMO_MODELS:
        for kind in DTYPES if dtype is None else (dtype,):
            checkpoint = replace(load(demo_model_path(name), dtype=kind, device=device), name=f"demo {name}")
            batch_size = BATCH_SIZE if settings.batch_size == 1 else settings.batch_size
            chosen = replace(settings, anchor=settings.anchor or "eager", batch_size=batch_size)
            if checkpoint.objective == "masked" and settings.mask_fraction == 1:
                chosen = replace(chosen, mask_fraction=MASK_FRACTION)
            for corpus in texts:
                fitting = chosen if corpus.kind == "pages" else replace(chosen, limit_tokens=None, stride=None)
                label = f"{name} {kind} {corpus.name}"
                yield label, checkpoint, corpus, fitting, label.replace(" ", "-")


def verdict(result: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a report keeps its bar, and the sentence that says by how much."""
    tested, anchor = result["quality"]["comparisons"][:2]
    name = f"{result['model']['name']} {result['model']['dtype']} on {result['data']['name']}"
    if result["model"]["dtype"] == "float32":
        change = abs(tested["perplexity_ratio"]["value"] - 1)
        kept = change <= MAX_RELATIVE_CHANGE
        sign = "<=" if kept else ">"
        return kept, f"{name}: relative change of perplexity {change:.2e} {sign} {MAX_RELATIVE_CHANGE:.0e}"
    # nats/token that the anchor may be from stock: the farther end of its mean difference's interval
    delta, difference = abs(tested["delta_nll"]["mean"]), anchor["delta_nll"]
    ends = ("mean",) if difference["low"] is None else ("low", "high")
    distance = max(abs(float(difference[end])) for end in ends)
    kept = delta <= distance
    sign = "<=" if kept else ">"
    return kept, f"{name}: |Δnll| {delta:.2e} {sign} {distance:.2e}, {anchor['implementation']}'s from stock"


def table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """One row per model, dtype and text; narrow enough for a terminal of 80 columns."""
    stock, tested, anchor = (arm["implementation"] for arm in reports[0]["quality"]["arms"][:3])
    caption = (
        f"same as stock?: in float32 the perplexity differs from {stock}'s by less than 0.001 %; in other dtypes by no "
        f"more than {anchor}'s does. speedup: over {stock} by the clock, the median of the batches."
    )
    shown = Table(title=f"{tested} against {stock}", caption=caption, box=box.SIMPLE_HEAD)
    for head in ("model", "dtype", "text", "perplexity", "same as stock?", "speedup"):
        shown.add_column(head, no_wrap=True, justify="right" if head in ("perplexity", "speedup") else "left")
    for result in reports:
        model, last = result["model"], result["data"]["kind"] == "lastword"
        perplexity = result["quality"]["arms"][1]["last_word_perplexity" if last else "perplexity"]
        shown.add_row(
            model["name"].removeprefix("demo "),
            model["dtype"],
            result["data"]["name"],
            # a masked model does not see what follows a last word: its number there says nothing of it
            "-" if last and model["objective"] == "masked" else f"{perplexity:.2f}",
            "yes" if verdict(result)[0] else "no",
            f"{result['cost']['speed'][1]['speed_ratio_wall']['median']:.2f}",
        )
    return shown
