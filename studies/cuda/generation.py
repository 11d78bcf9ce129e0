"""Generation by a static cache, whose steps Transformers compiles and captures by itself: milliseconds a token.

`generate()` as users call it, with a streamer that waits for the device and reads the clock at every token. The prompt
is read without a graph; the first tokens compile and capture, and the second half of them counts.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from adaattn_hf.plans.plan import Plan
from adaattn_hf.stats.stopwatch import quartiles

from ..cache_arms import shaped
from .measure import DEVICE, ON_CUDA, Cell, Section, length
from .model import by, mapped, records

TOKENS = 48 if ON_CUDA else 6
THOUSANDS = ((8, 8), (8, 32), (32, 32), (128, 128))
"""Tokens of a prompt, and the room of the cache behind it."""
ROWS = 4
"""Sequences of the padded cell: of so many tokens, three quarters of them, half, and a quarter."""


class Clock:
    """A streamer that keeps the time of every token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """A token has been chosen."""
        if ON_CUDA:
            torch.cuda.synchronize()
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""

    def milliseconds(self) -> list[float]:
        """Of each token of the second half."""
        steps = [(after - before) * 1e3 for before, after in zip(self.at, self.at[1:], strict=False)]
        return steps[len(steps) // 2 :]


def generation(section: Section) -> None:
    """One sequence behind three lengths, a cache with room for more, and padded rows."""
    found = shaped("8b" if ON_CUDA else "tiny", DEVICE)
    found = found if ON_CUDA else found.float()
    results = Path(__file__).parents[2] / "docs" / "results" / "budget.json"
    found.set_attn_implementation("adaattn")
    plans = {name: mapped(record, found)[0] for name, record in records(results).items()}
    for prompt, room in THOUSANDS:
        mask = torch.ones(1, length(prompt * 1024) - TOKENS, dtype=torch.long, device=DEVICE)
        section.add(
            f"{prompt}k tokens in a cache of {room}k, ms a token",
            partial(_cell, found=found, plans=plans, mask=mask, room=length(room * 1024)),
        )
    longest = length(4096)
    mask = torch.ones(ROWS, longest, dtype=torch.long, device=DEVICE)
    for row in range(ROWS):
        mask[row, : row * longest // ROWS] = 0
    section.add(
        f"{ROWS} rows of 4k to 1k, left-padded, in a cache of 8k, ms a token",
        partial(_cell, found=found, plans=plans, mask=mask, room=length(8192)),
    )


def _cell(row: Cell, found: Any, plans: dict[str, Plan], mask: Tensor, room: int) -> None:
    """All arms of a cell, each compiled afresh."""
    arms: dict[str, tuple[str, Plan | None]] = {"sdpa": ("sdpa", None), "exact": ("adaattn", None)}
    arms |= {f"plan {name}": ("adaattn", plan) for name, plan in plans.items()}
    arms["sdpa, DynamicCache"] = ("sdpa", None)
    notes = []
    for name, (implementation, plan) in arms.items():
        with by(found, implementation, plan), _compiled_afresh(found) as counted:
            cache: Any = DynamicCache(config=found.config)
            if not name.endswith("DynamicCache"):
                cache = StaticCache(config=found.config, max_cache_len=room)
            clock = Clock()
            _generate(found, mask, cache, clock)
        steps = clock.milliseconds()
        row[name] = statistics.median(steps)
        row.setdefault("quartiles", {})[name] = [round(number, 3) for number in quartiles(steps)[::2]]
        if counted["graphs"] != (1 if ON_CUDA and not name.endswith("DynamicCache") else 0) or counted["given up"]:
            notes.append(f"{name}: {counted['graphs']} graphs, captures given up: {counted['given up']}")
    if notes:
        row["note"] = "; ".join(notes)


def _generate(found: Any, mask: Tensor, cache: Any, clock: Clock) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 64, mask.shape, device=DEVICE)
    found.generate(
        ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
        past_key_values=cache, streamer=clock,
    )  # fmt: skip


@contextlib.contextmanager
def _compiled_afresh(found: Any) -> Iterator[dict[str, int]]:
    """Drops what Transformers compiled; tells behind it how many graphs there were, and captures given up."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    found.__dict__.pop("_compiled_call", None)
    told: dict[str, int] = {}
    yield told
    told["graphs"] = counters["stats"]["unique_graphs"]
    told["given up"] = counters["inductor"]["cudagraph_skips"]
