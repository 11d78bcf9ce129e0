"""Whole models, drawn with their calls, and how these are run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
import transformers as tf
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from adaattn_hf import AdaAttnCache
from tests.support.calls import DEFAULTS
from tests.support.malformed import Shown
from tests.support.models import main_output

from .inputs import Inputs, additive, inputs, kept
from .twins import BORDERLESS, DECODERS, ENCODERS, KERNEL, ROUTES, SHARING, class_of, offers

OURS = ("adaattn", "adaattn", "adaattn_sdpa", "adaattn_native", "adaattn_eager", KERNEL)
KEEPS_STATE = ("minimax", "lfm2")
"""Families whose other layers carry state from one document to the next."""
LOSES_LENGTHS = ("nemotron", "stablelm")
"""Families that pass no `cu_seq_lens_*` to attention: in a graph, and for the kernel, they have positions alone."""
TAKES_ROWS = ("esm", "layoutlm")
"""Families that add dimensions to a mask of four."""


@dataclass
class Whole(Shown):
    """A model and its calls."""

    family: str
    implementation: str
    given: Inputs
    dtype: torch.dtype
    default: torch.dtype  # torch's, while it is called
    prepared: bool  # whether adaattn_hf.prepare has seen it


@st.composite
def families(draw: st.DrawFn) -> str:
    """One of those whose masks lose borders, one of the three main ones, or any."""
    main = ("llama", "gpt2", "bert")
    return str(draw(st.sampled_from(draw(st.sampled_from([BORDERLESS, main, (*DECODERS, *ENCODERS)])))))


@st.composite
def wholes(draw: st.DrawFn, graph: bool = False, keeps: bool = False) -> Whole:
    """A model and calls for it; calls that a graph can be made of, where one shall be; or that keep some rows alone."""
    family, implementation = draw(families()), draw(st.sampled_from(OURS))
    if keeps:
        family = draw(st.sampled_from(draw(st.sampled_from([tuple(SHARING), keeping()]))))
    assume(offers(family, implementation))
    decodes = family not in ENCODERS
    given = draw(inputs(decodes, decodes and family not in KEEPS_STATE, family in TAKES_ROWS, graph))
    given = draw(kept(given)) if keeps else given
    if family in LOSES_LENGTHS and given.borders is not None and (graph or implementation == KERNEL):
        assume(given.positions is not None and given.mask is None)
    routes = any(part in family for part in ROUTES)
    half = not routes and draw(st.integers(0, 3)) == 0
    dtype = torch.bfloat16 if half and given.cache != "int8" else torch.float32
    default = draw(st.sampled_from(DEFAULTS))
    prepared = implementation == "adaattn" and not graph and draw(st.integers(0, 3)) == 0
    # a prepared model routes no padding, and so cannot follow the choices of one that does
    prepared = prepared and not (routes and given.cache == "int8")
    return Whole(family, implementation, given, dtype, default, prepared)


@cache
def keeping() -> tuple[str, ...]:
    """Families that take `logits_to_keep`."""
    return tuple(name for name in DECODERS if "logits_to_keep" in signature(class_of(name).forward).parameters)


def keywords(model: Any, given: Inputs, start: int, end: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"input_ids": given.ids[:, start:end]}
    if given.positions is not None:
        asked["position_ids"] = given.positions[:, start:end]
    mask = given.mask
    if mask is not None and mask.dim() == 2:
        asked["attention_mask"] = mask[:, :end]
    elif mask is not None:
        # stock eager attention adds what it is given
        adds = mask.dtype is torch.bool and model.config._attn_implementation == "eager"
        mask = additive(mask) if adds else mask
        mask = mask if mask.dtype is torch.bool else mask.to(model.dtype)
        asked["attention_mask"] = mask[:, :, start:end, :end]
    if given.borders is not None:
        longest = int(given.borders.diff().amax())
        asked |= dict(cu_seq_lens_q=given.borders, cu_seq_lens_k=given.borders)
        asked |= dict(max_length_q=longest, max_length_k=longest)
    if given.keep is not None:
        asked["logits_to_keep"] = given.keep
    return asked | ({"use_cache": given.cache == "made"} if given.cache in ("off", "made") else {})


def cache_for(model: Any, given: Inputs) -> Any:
    if given.cache == "static":
        return tf.StaticCache(config=model.config, max_cache_len=given.ids.shape[1] + 3)
    if given.cache in ("ours", "int8") and model.config._attn_implementation.startswith("adaattn"):
        return AdaAttnCache(model, "int8" if given.cache == "int8" else "model")
    return tf.DynamicCache(config=model.config) if given.cache in ("dynamic", "ours", "int8") else None


@contextmanager
def routing(model: Any, answers: list[Any], follow: bool) -> Iterator[None]:
    """Notes what the routers of a model answer, or lets them answer what those of another one did, call by call."""
    # a choice of experts is a step: the smallest rounding may flip it, after which outputs say nothing of the rounding
    noted = iter(list(answers))

    def answer(module: nn.Module, inputs: Any, output: Any) -> Any:
        if follow:
            return next(noted, output)
        answers.append(output)
        return output

    routers = (module for module in model.modules() if type(module).__name__.endswith("Router"))
    hooks = [router.register_forward_hook(answer) for router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run(model: Any, given: Inputs) -> Tensor:
    """What a model makes of its calls, `[rows, length, …]`."""
    cache, parts, start = cache_for(model, given), [], 0
    with torch.no_grad():
        for piece in given.pieces:
            asked = keywords(model, given, start, start + piece)
            if cache is not None:
                asked["past_key_values"] = cache
            out = model(**asked)
            parts.append(main_output(out))
            cache, start = (getattr(out, "past_key_values", None) if given.cache == "made" else cache, start + piece)
    return torch.cat(parts, 1)
