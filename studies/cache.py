"""Caches beside one another: `python -m studies.cache --model DIR --text FILE --write docs/results`.

What a token takes, how fast decode steps behind a filled cache are, and what a cache's rounding costs on real text:
Transformers' dynamic, static and quantised caches under `sdpa`, and this package's in each storage. Speed is that of
whole models, one shaped like LLaMA-3.2-1B with random weights in bfloat16 and the one named; caches are filled with
random keys, steps take the arms in turn, and ratios are of each round. Loss is teacher-forced over the cache.

On a CUDA device (`--device cuda --shape 8b`, without MODEL no loss) a model shaped like LLaMA-8B is made there, and the
arms follow one another, each with the device's memory to itself; the page is `cache_cuda.md`.

kvpress asks for older Transformers than these, and runs beside them: `pip install --no-deps kvpress cachetools fire`.
"""

from __future__ import annotations

import gc
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    QuantizedCache,
    StaticCache,
)

from adaattn_hf._files import write_atomically
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.timing import ratio_summary, timed, turn
from adaattn_hf.patches.cache.stored import CACHES, AdaAttnCache

from .cache_text import CONFIDENCE, PIECE, STOCK, Arm, behind_prompts, losses

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _quantised(backend: str, **options: int) -> Callable[[Any, int], Any]:
    return lambda model, room: QuantizedCache(backend, model.config, **options)


def _ours(stored: str) -> Callable[[Any, int], Any]:
    return lambda model, room: AdaAttnCache(model, stored, reserve=room)


def _dynamic(model: Any, room: int) -> DynamicCache:
    return DynamicCache(config=model.config)


def _press(name: str) -> Callable[[], Any]:
    """Makes a press of kvpress that drops half of a prompt's tokens."""
    return lambda: getattr(importlib.import_module("kvpress"), f"{name}Press")(compression_ratio=0.5)


PRESSES = ("Knorm", "SnapKV", "ExpectedAttention")
ARMS = (
    Arm(STOCK, "sdpa", _dynamic),
    Arm("StaticCache", "sdpa", lambda model, room: StaticCache(config=model.config, max_cache_len=room)),
    Arm("QuantizedCache fp8", "sdpa", _quantised("fp8")),
    Arm("QuantizedCache quanto, 4 bits", "sdpa", _quantised("quanto", nbits=4)),
    Arm("QuantizedCache hqq, 8 bits", "sdpa", _quantised("hqq", nbits=8, axis_key=1, axis_value=1)),
    *(Arm(f"kvpress {press}, half", "sdpa", _dynamic, 0.5, _press(press)) for press in PRESSES),
    *(Arm(f"AdaAttnCache {stored}", "adaattn", _ours(stored)) for stored in CACHES),
)


def present(model: Any, skipped: Sequence[str]) -> tuple[list[Arm], dict[str, str]]:
    """Returns the arms whose packages are installed, and of the others why not.

    Args:
        model: Any causal LM.
        skipped: Words in the names of arms that are left out.
    """
    found, absent = [], {}
    for arm in ARMS:
        if any(word in arm.name for word in skipped):
            absent[arm.name] = "left out"
            continue
        try:
            if arm.press is not None:
                arm.press()
            model.set_attn_implementation(arm.implementation)
            cache = arm.make(model, 8)
            with torch.no_grad():
                model(torch.ones(1, 4, dtype=torch.long, device=model.device), past_key_values=cache)
            found.append(arm)
        except (ImportError, ValueError) as error:
            absent[arm.name] = str(error).split("\n")[0][:200]
    return found, absent


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
def filled(arm: Arm, model: Any, batch: int, length: int, room: int) -> Any:
    """A cache that holds random keys and values of so many tokens."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator(model.device).manual_seed(0)
    model.set_attn_implementation(arm.implementation)
    cache = arm.make(model, room)
    shape = (batch, config.num_key_value_heads, max(1, int(length * arm.keep)), dim)
    key = torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(key.clone(), key.clone(), layer)
    return cache


@torch.no_grad()
def speed(
    model: Any, arms: Sequence[Arm], batch: int, length: int, rounds: int, steps: int, most: float
) -> list[dict[str, Any]]:
    """Seconds of decode steps behind filled caches, the arms in turn; a row for each arm.

    Rounds end early, after two at least, where they would take more than `most` seconds.
    """
    room = length + (rounds + 1) * steps
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    held: dict[str, int] = {}
    wall: dict[str, list[float]] = {arm.name: [] for arm in arms}
    process: dict[str, list[float]] = {arm.name: [] for arm in arms}
    # on a device that all caches do not fit into at once, one arm follows another
    for together in [[arm] for arm in arms] if model.device.type == "cuda" else [list(arms)]:
        started = time.perf_counter()
        caches = {arm.name: filled(arm, model, batch, length, room) for arm in together}
        held |= {name: held_bytes(cache) for name, cache in caches.items()}
        for number in range(rounds + 1):
            if number > 2 and time.perf_counter() - started > most * number / (number + 1):
                break  # another round would not fit
            for place in turn(len(together), number):
                arm = together[place]
                model.set_attn_implementation(arm.implementation)

                def step(cache: Any = caches[arm.name]) -> None:
                    model(token, past_key_values=cache)

                elapsed = timed(step, model.device, steps)[1]
                if number:  # the first round warms
                    wall[arm.name].append(elapsed.wall)
                    process[arm.name].append(elapsed.process)
        del caches
        gc.collect()
    return [
        {
            "cache": name,
            "batch": batch,
            "length": length,
            "bytes_per_token": held[name] / (batch * length),
            "tokens_per_second": batch / float(np.median(wall[name])),
            "wall": ratio_summary(*_paired(wall[STOCK], wall[name])),
            "process": ratio_summary(*_paired(process[STOCK], process[name])),
        }
        for name in wall
    ]


def _paired(stock: list[float], arm: list[float]) -> tuple[list[float], list[float]]:
    """As many rounds of each as both have."""
    count = min(len(stock), len(arm))
    return stock[:count], arm[:count]


SHAPES = {
    "1b": (
        "LLaMA-3.2-1B",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "tie_word_embeddings": True,
        },
    ),
    "8b": ("LLaMA-3.1-8B", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}),
    "tiny": (
        "a trial",
        {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
    ),
}
"""Models with random weights: whose shape they have, and what of it differs from one to the next."""


def shaped(shape: str, device: torch.device) -> Any:
    """A model of SHAPES in bfloat16, made on the device."""
    sizes: dict[str, Any] = {"vocab_size": 128256} | SHAPES[shape][1]
    config = LlamaConfig(
        **sizes, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=1 << 18
    )
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval().to(device)


def page(found: dict[str, Any]) -> str:
    """The results as a page."""
    made = found["provenance"]
    lines = [
        "# Caches beside one another",
        "",
        f"`python -m studies.cache`, {_where(made)}, commit {made['commit']}. Decode steps "
        f"of whole models behind a filled cache, at most {found['rounds']} rounds of {found['steps']} steps that take "
        f"the caches {'one after another' if made['driver'] else 'in turn'}; "
        f"times are ratios to {STOCK} under sdpa in the same round (median, quartiles), by the clock and by the "
        "process's time. Bytes are those of every storage that the cache holds, divided by the tokens in it.",
        "",
    ]
    for model, rows in found["speed"].items():
        lines += [
            f"## {model}",
            "",
            "| batch | tokens | cache | bytes/token | tokens/s | times as fast | quartiles | by process time |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            wall = row["wall"]
            lines.append(
                f"| {row['batch']} | {row['length']} | {row['cache']} | {row['bytes_per_token']:,.0f} | "
                f"{row['tokens_per_second']:.2f} | {wall['median']:.2f} | {wall['quartile_25']:.2f} to "
                f"{wall['quartile_75']:.2f} | {row['process']['median']:.2f} |"
            )
        bounds = [
            f"{floor / row['tokens_per_second']:.2f} (batch {batch}, {row['length']} tokens)"
            for batch, floor in found["floor"][model].items()
            for row in rows
            if row["cache"] == STOCK and row["batch"] == batch
        ]
        lines += [
            "",
            f"With no cache to read a step would be as many times as fast: {', '.join(bounds)}.",
            "",
        ]
    if found["loss"]:
        lines += [
            "## Loss",
            "",
            f"Teacher-forced in pieces of {PIECE} tokens behind a first one, {found['loss_of']}; Δnll against {STOCK}, "
            f"nats/token, upper bound at {CONFIDENCE:.0%} over windows.",
            "",
            "| cache | Δnll | at most | windows |",
            "|---|---|---|---|",
            *(
                f"| {row['cache']} | {row['delta_nll']:+.2e} | {row['upper']:+.2e} | {row['windows']} |"
                for row in found["loss"]
            ),
        ]
        lines += [
            "",
            "The same behind half a window read at once, pressed where an arm presses; needles found in such a prompt.",
            "",
            "| cache | Δnll | at most | needles found |",
            "|---|---|---|---|",
            *(
                f"| {row['cache']} | {row['delta_nll']:+.2e} | {row['upper']:+.2e} | {row['found']}/{row['needles']} |"
                for row in found["behind"]
            ),
        ]
    if found["absent"]:
        lines += ["", "Not measured here:", ""]
        lines += [f"* {name}: {reason}" for name, reason in found["absent"].items()]
    return "\n".join(lines) + "\n"


def _where(made: Mapping[str, Any]) -> str:
    """What measured: a device with its driver, or a processor with its threads."""
    if made["driver"]:
        return f"{made['device']}, {made['driver']}, torch {made['versions']['torch']}"
    return f"{made['cpu']}, {made['threads']} threads"


def _of_text(path: Path, text: Path, windows: int, window: int, gguf_file: str | None) -> tuple[Any, Tensor]:
    """A model in float32 and `[windows, window]` tokens of a text."""
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    words = text.read_text(encoding="utf-8")[: 12 * windows * window]
    ids = AutoTokenizer.from_pretrained(path)(words, return_tensors="pt")["input_ids"][0]
    if len(ids) < windows * window:
        raise typer.BadParameter(
            f"text: {len(ids)} tokens, expected at least {windows * window}; name a longer text"
        )
    return model, ids[: windows * window].view(windows, window)


@app.command()
def main(
    write: Annotated[
        Path, typer.Option(help="Directory of cache.json and cache.md; cache_cuda on a device.")
    ],
    model: Annotated[
        Path | None, typer.Option(help="A causal LM: a directory. Default: shapes alone, no loss.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text that loss is measured on; with MODEL.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    name: Annotated[
        str | None, typer.Option(help="What the page calls MODEL. Default: its directory.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    shape: Annotated[
        str, typer.Option(help=f"Shapes with random weights to measure, too: {', '.join(SHAPES)}.")
    ] = "1b",
    lengths: Annotated[str, typer.Option(help="Tokens in the caches.")] = "1024,8192",
    batches: Annotated[str, typer.Option(help="Sequences.")] = "1,8",
    rounds: Annotated[int, typer.Option(help="Rounds beside the one that warms.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps of an arm in a round.")] = 2,
    most: Annotated[
        float, typer.Option(help="Seconds of a model, length and batch after which rounds end.")
    ] = 70,
    skip: Annotated[str, typer.Option(help="Words in the names of caches to leave out: quanto,hqq.")] = "",
    windows: Annotated[int, typer.Option(help="Windows of text.")] = 10,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Measure, and write the page."""
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    shapes = [word for word in shape.split(",") if word]
    if (model is None) != (text is None) or set(shapes) - set(SHAPES):
        raise typer.BadParameter(
            f"model, text, shape: got {model}, {text} and {shapes}, expected both or none, and of {list(SHAPES)}"
        )
    found: dict[str, Any] = {
        "provenance": provenance(place), "rounds": rounds, "steps": steps, "absent": {}, "loss": [], "loss_of": "",
        "behind": [], "speed": {}, "floor": {},
    }  # fmt: skip
    makes: list[tuple[str, Callable[[], Any]]] = [
        (f"{SHAPES[one][0]}'s shape, random weights, bfloat16", partial(shaped, one, place)) for one in shapes
    ]
    left_out = [word for word in skip.split(",") if word]
    if model is not None and text is not None:
        named, ids = _of_text(model, text, windows, window, gguf_file)
        named = named.to(place)
        arms, found["absent"] = present(named, left_out)
        found["loss"] = losses(named, arms, ids.to(place))
        found["behind"] = behind_prompts(named, arms, ids.to(place))
        found["loss_of"] = (
            f"{name or model.name} in float32, {windows} windows of {window} tokens of {text.name}"
        )
        makes.insert(0, (f"{name or model.name}, bfloat16", lambda: named.to(torch.bfloat16)))
    for title, make in makes:
        one = make()
        arms, found["absent"] = present(one, left_out)
        found["speed"][title] = rows = []
        found["floor"][title] = {
            batch: speed(one, arms[:1], batch, 1, rounds, steps, most)[0]["tokens_per_second"]
            for batch in map(int, batches.split(","))
        }
        for length in map(int, lengths.split(",")):
            for batch in map(int, batches.split(",")):
                rows += speed(one, arms, batch, length, rounds, steps, most)
                gc.collect()
                typer.echo(f"{title}: {length} tokens, batch {batch}")
                stem = "cache_cuda" if place.type == "cuda" else "cache"
                write_atomically(write / f"{stem}.json", json.dumps(found, indent=1, sort_keys=True) + "\n")
                write_atomically(write / f"{stem}.md", page(found))


if __name__ == "__main__":
    app()
