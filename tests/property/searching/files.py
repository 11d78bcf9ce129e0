"""Saved caches and plans that something happened to: what is loaded is what was saved, or a sentence says it is not."""

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

import adaattn_hf
from adaattn_hf import AdaAttnCache, load_cache, save_cache
from adaattn_hf.eval.demo import demo_model_path, heldout_pages
from adaattn_hf.patches.cache import disk
from adaattn_hf.plans.choices import Choice, Window
from adaattn_hf.plans.plan import PlanError
from tests.support.command import adaattn
from tests.support.families import models
from tests.support.malformed import refused
from tests.support.models import tokens
from tests.support.plans import plan_for

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32}, "qwen3": {"head_dim": 32}, "mistral": {"head_dim": 32, "sliding_window": 4},
    "gpt2": {"num_attention_heads": 1},
}  # fmt: skip
"""Models whose heads have as many channels as four bits need."""
STORED = ("model", "int8", "k8v4")
HARM = ("nothing", "a flipped bit", "a flipped bit", "another byte", "cut short", "longer", "metadata", "metadata")
DEEP = 5000
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**9, 10**400, 0.5, float("nan"), "", "int8", "x", [], {}, [None], {"a": 1}, "DEEP"
)  # fmt: skip
"""What a field of the metadata may become; the last one stands for lists in lists that no parser follows."""


@dataclass
class Saved:
    """A cache of some tokens on its way through a file."""

    family: str
    stored: str
    count: int
    bound: bool  # whether the file names the model's weights
    harm: str
    place: float  # of the harm, between 0 and 1
    junk: Any  # what a field becomes


@st.composite
def saved(draw: st.DrawFn) -> Saved:
    return Saved(
        draw(st.sampled_from(list(FAMILIES))), draw(st.sampled_from(STORED)), draw(st.sampled_from([1, 5, 11])),
        draw(st.booleans()), draw(st.sampled_from(HARM)), draw(st.integers(0, 10**6 - 1)) / 10**6,
        draw(st.sampled_from(JUNK)),
    )  # fmt: skip


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
    if call.harm in ("a flipped bit", "another byte"):
        new = whole[at] ^ (1 << at % 8) if call.harm == "a flipped bit" else (whole[at] + 1 + at % 255) % 256
        return whole[:at] + bytes([new]) + whole[at + 1 :]
    if call.harm == "metadata":
        return with_metadata(call, whole)
    return {"cut short": whole[:at], "longer": whole + whole[:at]}.get(call.harm, whole)


def with_metadata(call: Saved, whole: bytes) -> bytes:
    """The file with one value of its metadata changed, in a header that is as it should be."""
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    about = json.loads(header["__metadata__"][disk._KEY])
    places = [*paths(about)]
    *way, last = places[int(call.place * len(places))]
    reduce(getitem, way, about)[last] = call.junk
    header["__metadata__"][disk._KEY] = json.dumps(about).replace('"DEEP"', "[" * DEEP + "]" * DEEP)
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + whole[8 + length :]


def paths(value: Any, above: tuple[Any, ...] = ()) -> Any:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        yield (*above, step)
        yield from paths(below, (*above, step))


def continued(call: Saved, file: bytes) -> Any:
    model = model_of(call.family)
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cache"
        path.write_bytes(file)
        held = load_cache(path, model)
        return model(input_ids=tokens(2, 1, seed=1), past_key_values=held).logits


def judge(call: Saved) -> str:
    """`served`, as before the harm, or `refused` in words."""
    whole = original(call.family, call.stored, call.count, call.bound)
    right = continued(call, whole)
    if call.harm == "nothing":
        assert torch.equal(continued(call, whole), right)
        return "served"
    try:
        found = continued(call, harmed(call, whole))
    except Exception as error:  # which one is what is judged
        return refused(error, ValueError)
    away = float((found - right).abs().amax())
    assert away == 0.0, f"accepted, and off by {away:.2e}"
    return "served"


CLAIM = ("budget", "lengths", "layers", "cache", "decode")
"""Fields of a plan that say what it does; all others say how it was found, which decides nothing."""
NEAR: tuple[Callable[[Any], Any], ...] = (
    lambda value: value * 2, lambda value: value / 2, lambda value: value + 1, lambda value: -value,
    lambda value: not value, lambda value: value[:-1], lambda value: [*value, *value],
)  # fmt: skip
"""What a value may become beside something of another kind."""
LAX: dict[str, Any] = {
    "gates": {"budget": 9.0, "top1": 0.0, "needles": 1.0, "rounding": 9.0},
    "settings": {"alpha": 0.5, "held_out": 2, "haystacks": 0, "top1": 0.0, "needles_lost": 1.0},
    "scoring": {"mask_share": 0.9, "maskings": 1}, "cache": {"stored": "model", "streaming": False},
}  # fmt: skip
"""What a plan brings along for its judge."""
BELIEVED: dict[str, Callable[[Any], bool]] = {
    "passed": bool, "upper": lambda upper: upper <= 1e-3, "confidence": lambda level: level >= 0.95 - 1e-9,
    "documents": lambda count: count >= 2, "tokens": lambda count: count >= 32, "kl": lambda kl: kl <= 1e-3 + 1e-6,
    "top1": lambda share: share >= 0.905, "sentence": lambda words: str(words).startswith("passed"),
}  # fmt: skip
"""What figures of `PROVEN` must be, with its budget of 1e-3, for a plan to run."""


@dataclass
class Edited:
    """A plan file of which one field is another, and who judges it: `load_plan` or `verify`, which finds it failing."""

    judged: str
    path: tuple[Any, ...]
    value: Any
    text: str = field(repr=False)


@cache
def plan_text(judged: str) -> str:
    """The file that is edited, in which each head sees one token where `verify` judges."""
    if judged == "load_plan":
        return plan_for(model_of("llama"), Choice.of(Window(2)), protocol=LAX).to_json()
    model = tf.AutoModelForCausalLM.from_pretrained(demo_model_path("llama"), attn_implementation="adaattn")
    every = tuple(range(model.config.num_hidden_layers))
    more: dict[str, Any] = {"budget": 0.01, "attention_layers": every, "protocol": LAX}
    return plan_for(model, Choice.of(Window(1)), every, (64,), **more).to_json()


@st.composite
def edited(draw: st.DrawFn, doors: tuple[str, ...] = (*["load_plan"] * 30, "verify")) -> Edited:
    judged = draw(st.sampled_from(doors))
    data = json.loads(plan_text(judged))
    top = draw(st.sampled_from(["verified", "protocol", None]))
    path = draw(st.sampled_from([place for place in paths(data) if top in (None, place[0])]))
    holder = reduce(getitem, path[:-1], data)
    value = draw(st.sampled_from(JUNK[:-1]))
    if draw(st.booleans()):
        try:
            value = draw(st.sampled_from(NEAR))(holder[path[-1]])
        except (TypeError, KeyError):  # slices are hashable from Python 3.12 on
            assume(False)
    assume(value != holder[path[-1]])
    holder[path[-1]] = value
    return Edited(judged, path, value, json.dumps(data))


@cache
def verified(text: str) -> Any:
    """What `adaattn verify` says of a plan, as a record; nothing where it is refused."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "text.txt").write_text("\n\n".join(heldout_pages()[:4]), encoding="utf-8")
        (place / "adaattn_plan.json").write_text(text, encoding="utf-8")
        say = ("--plan", place, "--data", place / "text.txt", "--held-out", "2", "--quiet", "--json")
        done = adaattn("verify", demo_model_path("llama"), *say, code=(0, 1, 2))
        return {} if done.exit_code == 2 else json.loads(done.stdout)


def loaded(text: str) -> Tensor:
    """What a model computes under a plan file."""
    model = models("llama", FAMILIES["llama"], tf.AutoModelForCausalLM).ours
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        Path(directory, "adaattn_plan.json").write_text(text, encoding="utf-8")
        logits: Tensor = adaattn_hf.load_plan(model, directory)(tokens(2, 11)).logits
    return logits


def judge_edited(call: Edited) -> str:
    """`refused` in words, or `served` where what was edited decides nothing: neither what runs nor who judges it."""
    plain, claimed = plan_text(call.judged), not {*CLAIM}.isdisjoint(call.path[:2])
    if call.judged == "verify":
        found, right = verified(call.text), verified(plain)
        same = not found or all(found[name] == right[name] for name in ("verdicts", "limits", "passed"))
        assert claimed or same, f"judged otherwise: {found['limits']} for {right['limits']}"
        return "served" if found else "refused"
    try:
        logits = loaded(call.text)
    except Exception as error:  # which one is what is judged
        return refused(error, PlanError)
    if call.path[0] == "verified":
        assert len(call.path) > 1, "believed without a verdict"
        assert BELIEVED.get(call.path[1], lambda _: True)(call.value), "believed below the limits"
    assert claimed or torch.equal(logits, loaded(plain)), "runs otherwise"
    return "served"
