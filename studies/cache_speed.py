"""How many bytes caches hold, also beside what is foretold, and how fast decode steps over them are."""

import gc
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import adaattn_hf
from adaattn_hf.eval.timing import ratio_summary, turn
from adaattn_hf.patches.cache.memory import CacheMemory
from adaattn_hf.stats.stopwatch import timed

from .cache_arms import OURS, TRIED
from .cache_text import Arm
from .front.jobs import filled

MARGIN = 0.05
"""Share by which a cache may hold more or less than `explain` foretells."""


def foretold(model: Any) -> dict[str, CacheMemory]:
    """What `explain` says of each of this package's caches, by the name of its arm."""
    model.set_attn_implementation("adaattn")
    found = {name: adaattn_hf.explain(model, cache=stored).cache for name, stored in OURS.items()}
    return {name: memory for name, memory in found.items() if memory is not None}


def held_bytes(cache: Any) -> int:
    """Bytes of every storage that a cache holds."""
    seen: dict[int, int] = {}
    met: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in met:
            return
        met.add(id(thing))
        if isinstance(thing, Tensor):
            if hasattr(thing, "__tensor_flatten__"):
                for name in thing.__tensor_flatten__()[0]:
                    walk(getattr(thing, name))
            else:
                storage = thing.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            for value in thing.values():
                walk(value)
        elif isinstance(thing, (list, tuple)):
            for value in thing:
                walk(value)
        elif hasattr(thing, "__dict__"):
            walk(vars(thing))

    walk(cache.layers)
    return sum(seen.values())


@torch.no_grad()
def speed(
    model: Any,
    arms: Sequence[Arm],
    batch: int,
    length: int,
    rounds: int,
    steps: int,
    most: float,
    memory: Mapping[str, CacheMemory],
) -> list[dict[str, Any]]:
    """Seconds of decode steps behind filled caches; a row for each arm, of one that fails the reason.

    On a CPU the arms take turns; on a device, which all caches do not fit into at once, one follows another.

    Args:
        model: A causal LM.
        arms: The caches; the first is the one that the others are compared with.
        batch, length: Sequences, and tokens in them.
        rounds, steps: Rounds beside the one that warms, and decode steps of an arm in a round.
        most: Seconds after which rounds end, after two at least; of one arm on a device.
        memory: What is foretold of some arms, by name.
    """
    room = length + (rounds + 1) * steps
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    alone, device = model.device.type == "cuda", model.device
    times: dict[str, list[Any]] = {}
    rows: dict[str, dict[str, Any]] = {arm.name: {"cache": arm.name, "batch": batch, "length": length} for arm in arms}
    for together in [[arm] for arm in arms] if alone else [list(arms)]:
        started, caches = time.perf_counter(), {}
        before = torch.cuda.memory_allocated(device) if alone else 0
        for number in range(-1, rounds + 1):
            if number > 2 and time.perf_counter() - started > most * number / (number + 1):
                break  # another round would not fit
            for place in turn(len(together), max(number, 0)):
                arm, row = together[place], rows[together[place].name]
                if "failed" in row:
                    continue
                try:
                    if number < 0:
                        model.set_attn_implementation(arm.implementation)
                        caches[arm.name] = filled(model, arm.make, batch, max(1, int(length * arm.keep)), room)
                        row["bytes_per_token"] = held_bytes(caches[arm.name]) / (batch * length)
                        if alone:
                            torch.cuda.reset_peak_memory_stats(device)
                        continue
                    model.set_attn_implementation(arm.implementation)
                    # nothing may keep the cache when its turn is over: the next one needs the room
                    elapsed = timed(partial(model, token, past_key_values=caches[arm.name]), device, steps)[1]
                    if number:  # the first round warms
                        times.setdefault(arm.name, []).append(elapsed)
                except TRIED as error:
                    row["failed"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
                    caches.pop(arm.name, None)
        if alone and "failed" not in rows[together[0].name]:
            peak = torch.cuda.max_memory_allocated(device) - before
            rows[together[0].name]["peak_per_token"] = peak / (batch * length)
        del caches
        gc.collect()
        if alone:
            torch.cuda.empty_cache()
    for name, row in rows.items():
        if "failed" not in row:
            row |= _figures(times.get(arms[0].name, []), times[name], batch)
        if name in memory:
            row["foretold_per_token"] = memory[name].predict(batch, room) / (batch * length)
    return list(rows.values())


def _figures(stock: list[Any], own: list[Any], batch: int) -> dict[str, Any]:
    """Speed of an arm, and its ratios to stock in as many rounds as both have."""
    count = min(len(stock), len(own))
    found: dict[str, Any] = {"tokens_per_second": batch / float(np.median([one.wall for one in own]))}
    for clock in ("wall", "process") if count else ():
        ratio = ([getattr(one, clock) for one in many[:count]] for many in (stock, own))
        found[clock] = ratio_summary(*ratio)
    return found


def beyond(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells whose caches hold more or less than what was foretold, by more than the margin."""
    found = []
    for row in rows:
        told, held = row.get("foretold_per_token"), row.get("bytes_per_token")
        if told is not None and held is not None and abs(held / told - 1) > MARGIN:
            found.append(f"{row['cache']}, {row['length']} tokens, batch {row['batch']}: {held / told:.3f}")
    return found
