"""Caches beside one another: `python -m studies.cache --model DIR --text FILE --write docs/results`.

What a token takes, how fast decode steps behind a filled cache are, and what a cache's rounding costs on real text:
Transformers' dynamic, static and quantised caches under `sdpa`, and this package's in each storage. Speed is that of
whole models, one shaped like LLaMA-3.2-1B with random weights in bfloat16 and the one named; caches are filled with
random keys, steps take the arms in turn, and ratios are of each round. Loss is teacher-forced over the cache, behind
a prompt that it holds, beside the bytes that it then takes.

On a CUDA device (`--device cuda --shape 8b`, without MODEL no loss) a model shaped like LLaMA-8B is made there, and the
arms follow one another, each with the device's memory to itself; the page is `cache_cuda.md`.

Every length and batch is written as soon as it is measured, of the loss every text that a cache has read, and
`--resume` goes on behind it, with other lengths, batches and shapes, too; `--only speed` (`loss`) measures one section
and leaves the other as it is, since each says when and where it was measured. A cache that fails (a device that is
full) leaves its reason. Caches of ours that hold more or less than `explain` foretells: exit code 1.

Caches of other libraries need those libraries; kvpress asks for older Transformers than these, and runs beside them:
`pip install --no-deps optimum-quanto ninja hqq termcolor einops kvpress cachetools fire`.
"""

import gc
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaattn_hf._files import write_atomically
from adaattn_hf.eval.provenance import provenance

from .cache_arms import ARMS, READ, SHAPES, present, shaped, weights_read
from .cache_page import page
from .cache_speed import beyond, foretold, held_bytes, speed
from .cache_text import PARTS, Arm, compared, prefilled, read_more

SECTIONS: dict[str, dict[str, Any]] = {
    "loss": {"text": "", "input": {}, "read": {}, "held": {}, "commits": {}, "rows": []},
    "speed": {"models": {}, "floor": {}, "weights": {}},
}
"""What there is to measure, and what each section holds before it begins."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def of_text(path: Path, text: Path, windows: int, window: int, gguf_file: str | None) -> tuple[Any, Tensor]:
    """A model in bfloat16 and `[windows, window]` tokens of a text."""
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options).eval()
    words = text.read_text(encoding="utf-8")[: 12 * windows * window]
    ids = AutoTokenizer.from_pretrained(path)(words, return_tensors="pt")["input_ids"][0]
    if len(ids) < windows * window:
        raise typer.BadParameter(f"text: {len(ids)} tokens, expected at least {windows * window}; name a longer text")
    return model, ids[: windows * window].view(windows, window)


LIBRARIES = {"quanto": "optimum-quanto", "hqq": "hqq", "kvpress": "kvpress"}
"""Packages by a word in the names of the caches that need them."""


def _libraries(arms: Sequence[Arm]) -> str:
    """Versions of the other libraries that ran, and which Transformers they ask for."""
    ran = [package for word, package in LIBRARIES.items() if any(word in arm.name for arm in arms)]
    found = []
    for package in ran:
        needs = importlib.metadata.requires(package) or ()
        asked = [one for one in needs if one.startswith("transformers") and "extra" not in one]
        version = importlib.metadata.version(package)
        found.append(f"{package} {version}" + (f" (asks for {', '.join(asked)})" if asked else ""))
    if not found:
        return ""
    pressed = ", whose presses are handed positions and cache by the names that they know" * ("kvpress" in ran)
    beside = importlib.metadata.version("transformers")
    return f"Other libraries, beside Transformers {beside}: {', '.join(found)}{pressed}."


def begun(file: Path, asked: dict[str, dict[str, Any]], place: torch.device, resume: bool) -> dict[str, Any]:
    """The sections of a record: those that are asked for empty, or as they were left; the others as they are.

    Args:
        file: The page's record.
        asked: The settings of each section that is asked for.
        place: What measures.
        resume: Whether to go on with the record.

    Raises:
        BadParameter: A section to go on with is of another run.
    """
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    # not the commit: the page itself lies in the checkout and changes its state
    same = ("device", "versions", "source", "threads")
    for section, settings in asked.items():
        made = provenance(place)
        empty = {"provenance": made, "asked": settings, "absent": {}, "libraries": "", **deepcopy(SECTIONS[section])}
        if resume and section in found:
            old = found[section]
            before, now = ({"asked": one["asked"], **{k: one["provenance"][k] for k in same}} for one in (old, empty))
            refuse_others(file, before, now)
        else:
            found[section] = empty
    return found


def refuse_others(file: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with a record of other settings.

    Raises:
        BadParameter: A setting differs.
    """
    differs = [key for key in now if before[key] != now[key]]
    if differs:
        raise typer.BadParameter(
            f"resume: {file} was measured with another {', '.join(differs)}; leave --resume out, or name "
            "another directory"
        )


@app.command()
def main(
    write: Annotated[Path, typer.Option(help="Directory of cache.json and cache.md; cache_cuda on a device.")],
    model: Annotated[
        Path | None, typer.Option(help="A causal LM: a directory. Default: shapes alone, no loss.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text that loss is measured on; with MODEL.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    name: Annotated[str | None, typer.Option(help="What the page calls MODEL. Default: its directory.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    shape: Annotated[
        str, typer.Option(help=f"Shapes with random weights to measure, too: {', '.join(SHAPES)}.")
    ] = "1b",
    lengths: Annotated[str, typer.Option(help="Tokens in the caches.")] = "1024,8192",
    batches: Annotated[str, typer.Option(help="Sequences.")] = "1,8",
    rounds: Annotated[int, typer.Option(help="Rounds beside the one that warms.")] = 5,
    steps: Annotated[int, typer.Option(help="Decode steps of an arm in a round.")] = 2,
    most: Annotated[
        float,
        typer.Option(help="Seconds of a length and batch after which rounds end; of a cache on a device."),
    ] = 70,
    only: Annotated[str, typer.Option(help="Parts to measure, in this order.")] = ",".join(SECTIONS),
    skip: Annotated[str, typer.Option(help="Words in the names of caches to leave out: quanto,hqq.")] = "",
    windows: Annotated[int, typer.Option(help="Windows of text.")] = 10,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the page that is there.")] = False,
) -> None:
    """Measure, and write the page."""
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    shapes = [word for word in shape.split(",") if word]
    parts = only.split(",")
    if (model is None) != (text is None) or set(shapes) - set(SHAPES) or set(parts) - set(SECTIONS):
        raise typer.BadParameter(
            f"model, text, shape, only: got {model}, {text}, {shapes} and {parts}, expected the first two both or "
            f"none, and of {list(SHAPES)} and {list(SECTIONS)}"
        )
    settings: dict[str, dict[str, Any]] = {
        "loss": {"skip": skip, "windows": windows, "window": window},
        "speed": {"skip": skip, "rounds": rounds, "steps": steps, "most": most},
    }
    asked = {part: settings[part] for part in parts if part == "speed" or model is not None}
    stem = write / ("cache_cuda" if place.type == "cuda" else "cache")
    found = begun(stem.with_suffix(".json"), asked, place, resume)

    def publish() -> None:
        write_atomically(stem.with_suffix(".json"), json.dumps(found, indent=1, sort_keys=True) + "\n")
        write_atomically(stem.with_suffix(".md"), page(found))

    def keep(words: str) -> None:
        typer.echo(words)
        publish()

    makes: list[tuple[str, Callable[[], Any]]] = [
        (f"{SHAPES[one][0]}'s shape, random weights, bfloat16", partial(shaped, one, place)) for one in shapes
    ]
    left_out = [word for word in skip.split(",") if word]
    if model is not None and text is not None:
        named, ids = of_text(model, text, windows, window, gguf_file)
        named = named.to(place)
        inputs = {
            "text": f"{name or model.name} in bfloat16, {windows} windows of {window} tokens of {text.name}",
            "input": {"gguf_file": gguf_file, "tokens": hashlib.sha256(ids.numpy().tobytes()).hexdigest()},
        }
        if "loss" in parts:
            loss, here = found["loss"], provenance(place)["commit"]
            # nothing was read before: any text will do
            known = {key: loss[key] or value for key, value in inputs.items()}
            refuse_others(stem.with_suffix(".json"), known, inputs)
            loss |= inputs
            arms, loss["absent"] = present(named, READ, left_out)
            loss["libraries"] = _libraries(arms)
            prompt = ids[0, : window // 2].to(place)
            for arm in arms:
                loss["held"][arm.name] = held_bytes(prefilled(named, arm, prompt, len(prompt))) / len(prompt)

            def kept(arm: Arm) -> None:
                loss["rows"] = compared(loss["read"], arms, windows, window)
                loss["commits"][arm.name] = here
                counts = (f"{len(loss['read'].get(part, {}).get(arm.name, ()))} {part}" for part in PARTS)
                keep(f"loss of {arm.name}: {', '.join(counts)}")

            read_more(named, arms, ids.to(place), loss["read"], kept)
        makes.insert(0, (f"{name or model.name}, bfloat16", lambda: named))
    cells = [(length, batch) for length in map(int, lengths.split(",")) for batch in map(int, batches.split(","))]
    for title, make in makes if "speed" in parts else []:
        timed = found["speed"]
        rows = timed["models"].setdefault(title, [])
        done = {(row["length"], row["batch"]) for row in rows}
        missing = [cell for cell in cells if cell not in done]
        if not missing:
            continue
        one = make()
        timed["weights"][title] = weights_read(one)
        arms, timed["absent"] = present(one, ARMS, left_out)
        timed["libraries"], memory = _libraries(arms), foretold(one)
        floor = timed["floor"].setdefault(title, {})
        for length, batch in missing:
            if str(batch) not in floor:
                empty = speed(one, arms[:1], batch, 1, rounds, steps, most, {})[0]
                floor[str(batch)] = empty["tokens_per_second"]
            rows += speed(one, arms, batch, length, rounds, steps, most, memory)
            keep(f"{title}: {length} tokens, batch {batch}")
        del one
        gc.collect()
    wrong = [cell for rows in found.get("speed", {}).get("models", {}).values() for cell in beyond(rows)]
    publish()  # once more: an end at a bad moment may have left an older page beside the record
    if wrong:
        typer.echo(f"held bytes over what explain foretells: {'; '.join(wrong)}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
