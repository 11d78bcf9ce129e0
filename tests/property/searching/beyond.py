"""Plans past their lengths in models with sliding layers: by whatever way tokens come, they are what one pass makes."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from hypothesis import strategies as st
from torch import Tensor

import adaattn_hf
from adaattn_hf.plans.choices import Choice, Precision, Window
from tests.support.calls import generator
from tests.support.malformed import Shown, refused
from tests.support.models import VOCABULARY
from tests.support.plans import plan_for

from .inputs import Inputs, masks
from .oracle import CLOSE
from .twins import DECODERS, ROUTES, SHARING, twin
from .whole import run

SLIDES = ("llama", *(name for name, changes in DECODERS.items() if "sliding_window" in changes))
BATCHES = ("llama", "mistral", "ministral", "qwen2", "gemma2", "gemma3_text", "phi3", "olmo3", "starcoder2")
"""Families that continuous batching takes."""
WAYS = (*["pieces"] * 6, "generate", "generate", "chunks", "batching")
WINDOWS, INT8 = (Window(3, 1), Window(4), Window(6, 2)), Precision("int8")
LOOSE = {"": 5 * CLOSE[torch.float32], "bf16": CLOSE[torch.bfloat16], "int8": 0.02}
"""How far sums in another order may lead, of the largest logit, as keys are rounded; one turned code of int8: 0.012."""


@dataclass
class Beyond(Shown):
    """A model under a plan for sequences up to `limit`, or exact (`parts` is empty), and how tokens come to it."""

    family: str
    parts: tuple[Any, ...]
    limit: int
    way: str
    given: Inputs
    prepared: bool


@st.composite
def beyond(draw: st.DrawFn) -> Beyond:
    way = draw(st.sampled_from(WAYS))
    family = draw(st.sampled_from(BATCHES if way == "batching" else (*SLIDES, *SHARING)))
    routed = any(part in family for part in ROUTES)
    precise = draw(st.sampled_from([None, None, Precision("bf16"), INT8]))
    parts = [draw(st.sampled_from([*WINDOWS, None])), None if routed else precise]
    rows, length = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([5, 10, 17, 24]))
    kind = draw(st.sampled_from(["none", "left", "left", "right" if way == "pieces" else "left"]))
    cache, cut = draw(st.sampled_from(["dynamic", "static", "ours"])), draw(st.integers(1, length - 1))
    pieces: tuple[int, ...] = (length,)
    if parts[1] == INT8 and way != "pieces":
        parts[1] = None  # whose rows are computed by how many come at once
    if parts[1] != INT8:
        pieces = draw(st.sampled_from([(length,), (cut, length - cut), (cut, *[1] * (length - cut))]))
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator(draw(st.integers(0, 999))))
    words = {"mask": kind, "cache": cache, "pieces": pieces, "rows": rows}
    given = Inputs(ids, None, draw(masks(rows, length, kind, True)), None, pieces, cache, words)
    chosen = () if family in SHARING else tuple(part for part in parts if part is not None)
    return Beyond(family, chosen, draw(st.sampled_from([4, 8, 15, 64])), way, given, draw(st.booleans()))


def planned(call: Beyond) -> Any:
    model = copy.deepcopy(twin(call.family, "adaattn"))
    if call.parts:
        every = tuple(range(model.config.num_hidden_layers))
        adaattn_hf.load_plan(model, plan_for(model, Choice.of(*call.parts), every, (call.limit,)))
    return adaattn_hf.prepare(model) if call.prepared else model


def answered(call: Beyond, model: Any) -> list[Tensor]:
    """`[length]` per row: its tokens, and those that a way of generation adds."""
    given, settings = call.given, {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    if call.way == "batching":
        prompts = [row[real].tolist() for row, real in zip(given.ids, given.real, strict=True)]
        engine = tf.ContinuousBatchingConfig(num_blocks=64, block_size=32, max_batch_tokens=16)
        with adaattn_hf.continuous_batching(model):
            found = model.generate_batch(
                inputs=prompts, generation_config=tf.GenerationConfig(**settings, eos_token_id=-1),
                continuous_batching_config=engine, progress_bar=False,
            ).values()  # fmt: skip
        assert not (errors := [answer.error for answer in found if answer.error]), errors
        return [torch.tensor([*p, *answer.generated_tokens]) for p, answer in zip(prompts, found, strict=True)]
    asked = settings | ({"prefill_chunk_size": 3} if call.way == "chunks" else {})
    out = model.generate(given.ids, attention_mask=given.real.long(), **asked)
    return [torch.cat([row[: len(real)][real], row[len(real) :]]) for row, real in zip(out, given.real, strict=True)]


def places(call: Beyond, real: Tensor) -> Tensor:
    """`[tokens]`: the positions that a row's tokens had, counted with its padding: int8 rounds what they turned."""
    return torch.arange(len(real))[real] if call.way == "pieces" else torch.arange(call.given.ids.shape[1] + 12)


def judge(call: Beyond) -> str:
    """`served`, or `refused` in words; fails where one pass over a row alone makes other logits, or likes others."""
    given, pieces = call.given, call.way == "pieces"
    try:
        model = planned(call)
        with torch.no_grad():
            found = run(model, given) if pieces else answered(call, model)
    except Exception as error:  # which one is what is judged
        return refused(error)
    loose = max(LOOSE[part.precision if isinstance(part, Precision) else ""] for part in (*call.parts, None))
    for row, real in enumerate(given.real):
        ids = given.ids[row][real] if pieces else found[row]
        with torch.no_grad():
            positions = places(call, real)[None, : len(ids)]
            whole = model(ids[None], position_ids=positions, use_cache=False).logits[0]
        own = whole[int(real.sum()) - 1 : -1]
        less = found[row][real] - whole if pieces else own.amax(1) - own.gather(1, ids[-len(own) :, None])[:, 0]
        limit = loose * max(1.0, float(whole.abs().amax()))
        assert float(less.abs().amax()) <= limit, (
            f"row {row} off by {float(less.abs().amax()):.2e}, allowed {limit:.2e}"
        )
    return "served"
