"""Saved caches that something happened to: what is loaded is what was saved, or a sentence says that it is not."""

import json
import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers as tf
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf import AdaAttnCache, load_cache, save_cache
from adaattn_hf.patches.cache import disk
from tests.support.families import models
from tests.support.malformed import Shown, raised_here
from tests.support.models import tokens

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 4},
    "gpt2": {"num_attention_heads": 1},
}
"""Models whose heads have as many channels as four bits need."""
STORED = ("model", "int8", "k8v4")
HARM = ("nothing", "a flipped bit", "a flipped bit", "another byte", "cut short", "longer", "metadata", "metadata")
DEEP = 5000
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**9, 10**400, 0.5, float("nan"), "", "int8", "x", [], {}, [None], {"a": 1}, "DEEP"
)  # fmt: skip
"""What a field of the metadata may become; the last one stands for lists in lists that no parser follows."""


@dataclass(repr=False)
class Saved(Shown):
    """A cache on its way through a file.

    Attributes:
        family, stored, count: Model, format and number of tokens.
        bound: Whether the file names the model's weights.
        harm, place, junk: What happens to the file, where (between 0 and 1), and what a field becomes.
    """

    family: str
    stored: str
    count: int
    bound: bool
    harm: str
    place: float
    junk: Any

    def __repr__(self) -> str:
        """Everything but a number of 400 digits."""
        where = f"{self.harm} at {self.place:.4f}, {self.junk!r:.40}"
        return f"Saved({self.family}, {self.stored}, {self.count} tokens, bound={self.bound}, {where})"


@st.composite
def saved(draw: st.DrawFn) -> Saved:
    return Saved(
        draw(st.sampled_from(list(FAMILIES))),
        draw(st.sampled_from(STORED)),
        draw(st.sampled_from([1, 5, 11])),
        draw(st.booleans()),
        draw(st.sampled_from(HARM)),
        draw(st.integers(0, 10**6 - 1)) / 10**6,
        draw(st.sampled_from(JUNK)),
    )


@cache
def model_of(family: str) -> Any:
    return models(family, FAMILIES[family], tf.AutoModelForCausalLM).ours


@cache
def original(family: str, stored: str, count: int, bound: bool) -> bytes:
    model = model_of(family)
    made = AdaAttnCache(model, stored)
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        model(input_ids=tokens(2, count), past_key_values=made)
        return save_cache(made, Path(directory) / "cache", model if bound else None).read_bytes()


def harmed(call: Saved, whole: bytes) -> bytes:
    at = int(call.place * len(whole))
    if call.harm == "a flipped bit":
        return whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]
    if call.harm == "another byte":
        return whole[:at] + bytes([(whole[at] + 1 + at % 255) % 256]) + whole[at + 1 :]
    if call.harm == "cut short":
        return whole[:at]
    if call.harm == "longer":
        return whole + whole[:at]
    return with_metadata(call, whole) if call.harm in ("metadata", "sealed") else whole


def with_metadata(call: Saved, whole: bytes) -> bytes:
    """The file with one value of its metadata changed, in a header that is as it should be; `sealed` anew or not."""
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    about = json.loads(header["__metadata__"][disk._KEY])
    places = [*paths(about)]
    *way, last = places[int(call.place * len(places))]
    holder = about
    for step in way:
        holder = holder[step]
    holder[last] = call.junk
    text = json.dumps(about).replace('"DEEP"', "[" * DEEP + "]" * DEEP)
    header["__metadata__"][disk._KEY] = text
    if call.harm == "sealed":
        header["__metadata__"][disk._CHECKSUM] = disk._checksum(text, safetensors.torch.load(whole))
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + whole[8 + length :]


def paths(value: Any, above: tuple[Any, ...] = ()) -> Any:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        yield (*above, step)
        yield from paths(below, (*above, step))


def continued(call: Saved, file: bytes) -> Tensor:
    model = model_of(call.family)
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cache"
        path.write_bytes(file)
        held = load_cache(path, model)
        logits: Tensor = model(input_ids=tokens(2, 1, seed=1), past_key_values=held).logits
        return logits


def judge(call: Saved) -> str:
    """`served`, as before the harm, or `refused` in words.

    Raises:
        AssertionError: Other tokens are served than were saved, or an error is nobody's.
    """
    whole = original(call.family, call.stored, call.count, call.bound)
    right = continued(call, whole)
    try:
        found = continued(call, harmed(call, whole))
    except Exception as error:  # which one is what is judged
        if call.harm != "nothing" and isinstance(error, ValueError) and raised_here(error):
            return "refused"
        raise AssertionError(f"{type(error).__name__}: {error!s:.200}") from error
    away = float((found - right).abs().amax())
    assert away == 0.0, f"accepted, and off by {away:.2e}"
    return "served"
