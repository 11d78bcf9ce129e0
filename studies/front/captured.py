"""Captured decode steps where keys and values are the cost: `python -m studies.front.captured FILE 8 4096 16384`.

Rows, then tokens behind which they step. Exact attention, a stated plan (every second key/value head keeps a window of
1,024 keys and 4 sinks; unverified, as weights are random), caches of codes, both, a memory plan (the same heads store
nothing else), and stock. One graph of each serves all lengths: its counters are set back, and codes and numbers are
random. FILE is kept and added to; `--page DIR` writes `steps.json` and `steps.md` of it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import adaattn_hf
from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.patches.cache.caches import AdaAttnCache
from adaattn_hf.patches.checkpoint import resolve_device
from adaattn_hf.patches.plans.configured import computes_by
from adaattn_hf.patches.plans.hashes import model_hash, weight_hash
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.plans.choices import Choice, Window
from adaattn_hf.plans.plan import PLAN_FORMAT, LayerPlan, Plan

from ..pages import table
from .jobs import (
    CACHES,
    QWEN15,
    ROUNDS,
    Arm,
    Job,
    _captured,
    _step,
    filled,
    language,
    measure,
    noted,
    step,
    told,
    twin,
    way,
)
from .page import seconds, speedup, traced

WINDOW, SINKS, SPARE = 1024, 4, 64
EXACT, EMPTY = "adaattn, exact", "adaattn, exact, no keys"
CODES = {"int8": 258 / 512, "k8v4": 194 / 512}
"""Bytes of a token's codes and scales of heads of 128 channels, over those of bfloat16."""


def planned(model: Any, tokens: int) -> Any:
    """A copy of a model under the stated plan, which speaks for so many tokens."""
    model = twin(model)
    modules, config = dict(attention_modules(model, model.config.model_type)), model.config
    window = Choice.of(Window(min(WINDOW, tokens // 4), SINKS))
    choices = tuple(window if head % 2 else Choice.of() for head in range(config.num_key_value_heads))
    plan = Plan(
        format=PLAN_FORMAT, model_type=config.model_type, weight_hash=model_hash(model), attention_layers=(),
        configuration=computes_by(next(iter(modules.values())).config), dtype=str(model.dtype).removeprefix("torch."),
        adaattn=adaattn_hf.__version__, torch=torch.__version__, transformers=transformers.__version__, budget=1.0,
        seed=0, data_fingerprint="", protocol={}, lengths=(tokens,), units=(), verified=None, tensors="",
        layers=tuple(LayerPlan(at, weight_hash(module), choices) for at, module in modules.items()),
    )  # fmt: skip
    return adaattn_hf.load_plan(model, plan, unverified=True)


@torch.no_grad()
def _full(model: Any, past: Any, rows: int, tokens: int) -> Any:
    """A cache of ours that holds a short prompt of random tokens, and random keys and values up to so many tokens."""
    config, prompt = model.config, torch.randint(0, 1000, (rows, min(64, tokens // 2)), device=model.device)
    model(prompt, past_key_values=past, use_cache=True, logits_to_keep=1)
    shape = rows, config.num_key_value_heads, tokens - prompt.shape[1], config.hidden_size // config.num_attention_heads
    for index, layer in enumerate(past.layers):
        keys, values = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        past.update(keys, values, index)
        if layer.spans:
            layer.read((0,) * rows)
    return past


def _behind(past: Any, tokens: int) -> None:
    """Lets a cache of fixed room count so many tokens; what lies in its room stays."""
    for layer in past.layers:
        if hasattr(layer, "stores"):
            for store in layer.stores():
                store.count.fill_(tokens)
                store.counted_on_the_device()
        else:
            layer.cumulative_length.fill_(tokens)


def jobs(device: torch.device, sizes: Mapping[str, Any], rows: int, lengths: list[int]) -> Iterator[Job]:
    """A job for each length, longest last; models, caches and graphs are made once."""
    room = max(lengths) + SPARE
    dynamic = language(device, sizes, None)
    exact, static = twin(dynamic), twin(dynamic)
    exact.set_attn_implementation("adaattn")
    plan, token = planned(exact, room), torch.ones(rows, 1, dtype=torch.long, device=device)

    def ours(model: Any, stored: str, **how: Any) -> Any:
        return _full(model, AdaAttnCache(model, stored, max_cache_len=room, **how), rows, room)

    makes = {
        EXACT: (exact, partial(filled, exact, CACHES["StaticCache"], rows, room, room), 1.0, False),
        "adaattn, plan": (plan, partial(filled, plan, CACHES["StaticCache"], rows, room, room), 1.0, True),
        "adaattn, int8": (exact, partial(ours, exact, "int8"), CODES["int8"], False),
        "adaattn, k8v4": (exact, partial(ours, exact, "k8v4"), CODES["k8v4"], False),
        "adaattn, plan, int8": (plan, partial(ours, plan, "int8"), CODES["int8"], True),
        "adaattn, memory plan, int8": (plan, partial(ours, plan, "int8", streaming=True), CODES["int8"], True),
    }
    kept: dict[str, tuple[Any, Any]] = {}

    def run(name: str) -> None:
        kept[name][1]()

    def again(name: str, model: Any, make: Any, tokens: int) -> None:
        if name not in kept:
            print(f"{time.perf_counter():.0f} s: {name}", flush=True)
            past = make()
            steps = device.type == "cuda" and past.is_compileable
            kept[name] = past, _captured(model, token, past) if steps else partial(_step, model, token, past)
        if kept[name][0].is_compileable:
            _behind(kept[name][0], tokens)

    for tokens in sorted(lengths):
        arms: dict[str, Arm | str] = {}
        shares = {EMPTY: 0.0}
        for name, (model, make, share, windows) in makes.items():
            arms[name] = Arm(partial(run, name), partial(again, name, model, make, tokens))
            shares[name] = share * ((1 + min(1.0, (WINDOW + SINKS) / tokens)) / 2 if windows else 1.0)
        of = EXACT, *makes[EXACT][:2]
        arms[EMPTY] = Arm(partial(run, EXACT), partial(again, *of, 0))
        for name in ("sdpa", "flash_attention_2"):
            work = step(dynamic, "DynamicCache", token, rows, tokens, room)
            arms[f"{name}, DynamicCache"] = way(dynamic, work, name)
        of = "sdpa", static, partial(filled, static, CACHES["StaticCache"], rows, room, room)
        fits = tokens == max(lengths)  # it reads all of its room, whatever is in it
        own = Arm(partial(run, of[0]), partial(again, *of, tokens))
        arms["sdpa, StaticCache"] = own if fits else "reads its whole room"
        title = f"Qwen2.5-1.5B's shape, {sizes['num_hidden_layers']} layers, a token behind {rows} x {tokens:,} tokens"
        yield Job(title, {"timed": "whole model", "dtype": "bfloat16", "room": room, "shares": shares}, arms, 5)


def page(cells: Mapping[str, Any]) -> str:
    """All arms of all cells: milliseconds, how many times as fast as exact, and how many the bytes allow."""
    lines = ["# Captured decode steps", "", f"`python -m studies.front.captured`, {traced(cells)}", "", (
        "Whole models of random weights; caches are filled with random keys and values, and no step is behind a real "
        "prompt. Arms take turns, each five steps. The plan is stated, not calibrated and unverified: every second "
        f"key/value head keeps a window of {WINDOW:,} keys and {SINKS} sinks. *At most*: exact's time over that of a "
        "step without keys plus the arm's share of the bytes of keys and values times the rest of exact's."
    ), ""]  # fmt: skip
    for cell in cells.values():
        times = {name: statistics.median(found) for name, found in seconds(cell).items()}
        rest, shares = times[EXACT] - times[EMPTY], cell["conditions"]["shares"]
        rows = []
        for name, middle in times.items():
            low, _, high = (1e3 * part for part in statistics.quantiles(cell["arms"][name]["wall"], n=4))
            least, ratio, most = speedup(cell, EXACT, name)
            bound = f"{times[EXACT] / (times[EMPTY] + shares[name] * rest):.2f}" if name in shares else "–"
            busy = f"{cell['arms'][name]['kernels'] / middle:.0%}" if "kernels" in cell["arms"][name] else "–"
            gain = f"{ratio:.2f} ({least:.2f}–{most:.2f})"
            rows.append((name, f"{1e3 * middle:.3f} ({low:.3f}–{high:.3f})", busy, gain, bound))
        lines += [f"## {cell['says'].rpartition('behind ')[2]}", ""]
        lines += table(("arm", "ms (quartiles)", "GPU busy", "times as fast as exact", "at most"), rows)
        lines += [f"* {name}: not timed, {arm['absent']}" for name, arm in cell["arms"].items() if "absent" in arm]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measures, and writes the page."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("file", type=Path, help="JSON that cells are kept in")
    words.add_argument("rows", type=int, nargs="?", help="sequences")
    words.add_argument("lengths", type=int, nargs="*", help="tokens behind which they step")
    words.add_argument("--rounds", type=int, default=ROUNDS, help="fewer for a trial")
    words.add_argument("--layers", type=int, default=28, help="fewer for a trial, whose graphs compile sooner")
    words.add_argument("--page", type=Path, help="directory of steps.json and steps.md")
    asked = words.parse_args()
    kept = json.loads(asked.file.read_text(encoding="utf-8")) if asked.file.is_file() else {}
    device = resolve_device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.config.recompile_limit = 64  # all arms are one function of Transformers
    sizes = {**QWEN15, "num_hidden_layers": asked.layers}
    if device.type == "cpu":
        sizes |= {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    for job in jobs(device, sizes, asked.rows, asked.lengths) if asked.lengths else ():
        began = time.perf_counter()
        kept[job.says] = noted(job, device, measure(job, device, asked.rounds))
        write_atomically(asked.file, json_text(kept, indent=1, sort_keys=True) + "\n")
        told(job.says, time.perf_counter() - began, kept[job.says])
    if asked.page:
        write_atomically(asked.page / "steps.json", json_text(kept, indent=1, sort_keys=True) + "\n")
        write_atomically(asked.page / "steps.md", page(kept))


if __name__ == "__main__":
    main()
