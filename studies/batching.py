"""Continuous batching: seconds to read prompts, then tokens per second, `python -m studies.batching --write DIR`.

A model with the shape of LLaMA-8B and random weights. Requests of one length arrive together, at most 8 and at most 64k
tokens in all. Tokens per second are those of all requests, after the last prompt is read; a step makes one token for
each request. Stock attention runs with the engine's defaults (CUDA graphs with flash-attn). `eager` is not measured, as
its scores would fill the device. Implementations take turns, as the host is what a step waits for, and hosts waver:
figures are medians of the turns, in brackets the least and the most. Each turn the engine answers twice and the second
answer counts, so making its cache is not in the figures; `generate_batch` does that in every call.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

import adaattn_hf
from adaattn_hf._files import write_atomically
from adaattn_hf.patches.registry import engine_name

from .cache_arms import shaped
from .cuda.measure import DEVICE, ON_CUDA, Cell, Section, length, setting
from .cuda.model import by, mapped, records
from .pages import table

PROMPTS = "2048,8192,32768"
NEW, PAGE = (33, 256) if ON_CUDA else (4, 32)
TURNS = 5
SDPA = "paged|sdpa" if engine_name("sdpa").startswith("paged") else "sdpa"
PLANNED = "adaattn under the plan of 1 %"
KNOWN = {field.name for field in fields(ContinuousBatchingConfig)}


def requests_of(n: int) -> int:
    """How many requests of `n` tokens are served at once."""
    return max(1, min(8, length(1 << 16) // n))


@contextlib.contextmanager
def serving(model: Any, n: int, engine: dict[str, Any]) -> Iterator[Any]:
    """The engine of a model at work, with room for the requests of a length."""
    blocks = -(-(n + NEW) // PAGE) + 1
    asked = {
        # the engine reads no further prompt where less than a fifth of its blocks is free
        "num_blocks": requests_of(n) * blocks * 3 // 2,
        "page_size": PAGE, "block_size": PAGE, "max_batch_tokens": length(8192),
        "max_requests_per_batch": 8, "max_blocks_per_request": blocks if ON_CUDA else None,
        "allow_block_sharing": False, "auto_switch_to_flash": False, **engine,
    }  # fmt: skip
    asked.pop("block_size" if "page_size" in KNOWN else "page_size")
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**{k: v for k, v in asked.items() if k in KNOWN}),
    )
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True)


def answered(manager: Any, prompts: list[list[int]], new: int) -> tuple[float, list[list[float]]]:
    """When requests were handed over, and the times at which each one's tokens came.

    Raises:
        RuntimeError: The engine stopped, or answered with an error.
    """
    found: list[Any] = []
    started = time.perf_counter()
    manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True)
    while len(found) < len(prompts):
        one = manager.get_result(timeout=1)
        if one is None and not manager.is_running():
            raise RuntimeError("the engine stopped")
        if one is not None and one.is_finished():
            found.append(one)
    errors = [one.error for one in found if one.error]
    if errors or any(len(one.timestamps) != new for one in found):
        raise RuntimeError(f"the engine: {errors[:1] or 'fewer tokens than asked for'}")
    return started, [one.timestamps for one in found]


def measured(row: Cell, model: Any, n: int, engine: dict[str, Any]) -> None:
    """Seconds until every request has its first token, then tokens a second of all, and milliseconds of a step."""
    prompts = torch.randint(0, 64, (requests_of(n), n), generator=torch.Generator().manual_seed(n)).tolist()
    with serving(model, n, engine) as manager:
        answered(manager, prompts, 2)  # warms
        started, times = answered(manager, prompts, NEW)
    read, end = max(one[0] for one in times), max(one[-1] for one in times)
    later = [at for one in times for at in one if at > read]
    if 2 * len(later) < (NEW - 1) * len(times):
        raise RuntimeError(f"the engine served its requests in turn: {len(later)} tokens came behind the last prompt")
    row |= {"prompt": n, "requests": len(prompts), "s": read - started, "tokens/s": len(later) / (end - read)}
    row["ms a step"] = (end - read) * 1e3 / (NEW - 1)


def page(section: Section) -> str:
    """The page of what was measured."""
    made = section.setting
    head = ("implementation", "tokens of a prompt", "requests", "prompts read, s", "then tokens/s", "ms per step")
    turns: dict[tuple[str, str], list[Cell]] = {}
    for cell in section.cells:
        arm, n, _ = cell["cell"].rsplit(", ", 2)
        turns.setdefault((arm, n), []).append(cell)
    rows: list[tuple[str, ...]] = []
    found = {}
    for (arm, n), cells in turns.items():
        if failed := next((cell["failed"] for cell in cells if "failed" in cell), None):
            rows.append((arm, n, "", failed, "", ""))
            continue
        found[arm, n] = statistics.median(cell["tokens/s"] for cell in cells)
        parts = ([cell[key] for cell in cells] for key in ("s", "tokens/s", "ms a step"))
        figures = (f"{statistics.median(all_):.3g} [{min(all_):.3g}, {max(all_):.3g}]" for all_ in parts)
        rows.append((arm, f"{int(n):,}", str(cells[0]["requests"]), *figures))
    gain = " ".join(
        f"Tokens per second of {name} over {other}, by tokens of a prompt: {', '.join(over)}."
        for name, other in (("adaattn", "sdpa"), (PLANNED, "adaattn"))
        if (over := [f"{own / found[other, n]:.2g} at {int(n):,}" for (arm, n), own in found.items()
                     if arm == name and (other, n) in found])
    )  # fmt: skip
    where = f"{made['device']}, torch {made['torch']}, Transformers {made['transformers']}, commit {made['commit']}."
    said = " ".join((__doc__ or "").partition("\n\n")[2].split())
    made_by = "Made by `python -m studies.batching`; the figures lie in `batching.json`."
    return "\n".join(["# Continuous batching", "", gain, "", made_by, said, "", where, "", *table(head, rows)])


def main(lengths: list[int], write: Path) -> None:
    """Every arm at every length, each kept as it is found; then the page."""
    write.mkdir(parents=True, exist_ok=True)
    section = Section(write / "batching.json", setting(), {})
    model = shaped("8b" if ON_CUDA else "tiny", DEVICE)
    model = model if ON_CUDA else model.float()
    results = Path(__file__).parents[1] / "docs" / "results" / "budget.json"
    plan = mapped(records(results)["1 %"], model)[0]
    arms: dict[str, tuple[str, Any]] = {
        "adaattn": ("adaattn", None),
        PLANNED: ("adaattn", plan),
    }
    arms["sdpa"] = (SDPA, None)
    for version, there in ((2, is_flash_attn_2_available()), (3, is_flash_attn_3_available())):
        if ON_CUDA and there:
            arms[f"flash_attention_{version}"] = (f"flash_attention_{version}", None)
    for n, turn in itertools.product(lengths, range(TURNS)):
        for name, (implementation, its) in list(arms.items())[:: 1 if turn % 2 else -1]:
            ours = implementation == "adaattn"
            block = adaattn_hf.continuous_batching if ours else contextlib.nullcontext
            engine = {"use_cuda_graph": False} if ours else {}
            with by(model, implementation, its), block(model):
                section.add(f"{name}, {n}, {turn}", partial(measured, model=model, n=n, engine=engine))
    write_atomically(write / "batching.md", page(section))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default=PROMPTS, help="tokens of each prompt, comma-separated")
    parser.add_argument("--write", type=Path, default=Path("build"), help="directory of batching.json and batching.md")
    given = parser.parse_args()
    main([length(int(n)) for n in given.prompts.split(",")], given.write)
