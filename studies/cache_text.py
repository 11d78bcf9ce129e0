"""What caches cost on text: the loss over each behind a prompt, and needles hidden in the prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaattn_hf.eval.needles import KEY, VALUE, build, is_found, most
from adaattn_hf.stats.paired import clustered_ratio, score_tokens

STOCK = "DynamicCache"
PIECE = 64
"""Tokens that are read at a time behind a prompt."""
CONFIDENCE = 0.95
HAYSTACKS, NEEDLES = 4, 16


@dataclass(frozen=True)
class Arm:
    """A cache under an attention implementation; `make(model, room)` is empty and has room for so many tokens.

    What a `press` drops of a prompt leaves `keep` of it.
    """

    name: str
    implementation: str
    make: Callable[[Any, int], Any]
    keep: float = 1.0
    press: Callable[[], Any] | None = None


@contextmanager
def pressed(model: Any, press: Any) -> Iterator[None]:
    """A press at work, which knows the cache of an attention layer by the name that it had before Transformers 5.24."""

    def rename(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {"past_key_values" if name == "cache" else name: value for name, value in kwargs.items()}

    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    hooks = [layer.register_forward_pre_hook(rename, with_kwargs=True) for layer in layers]
    try:
        with press(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def prefilled(model: Any, arm: Arm, prompt: Tensor, room: int) -> Any:
    """The cache of an arm behind a prompt `[n]` that is read at once, under its press, with room for so many tokens."""
    model.set_attn_implementation(arm.implementation)
    cache = arm.make(model, room)
    # presses know a prompt by a keyword that Transformers no longer sends by itself
    more = {} if arm.press is None else {"cache_position": torch.arange(len(prompt), device=prompt.device)}
    with nullcontext() if arm.press is None else pressed(model, arm.press()):
        model(prompt[None], past_key_values=cache, logits_to_keep=1, **more)
    return cache


@torch.no_grad()
def read(model: Any, arm: Arm, tokens: Tensor, prompt: int) -> Tensor:
    """Logits `[n - prompt, vocab]` of tokens `[n]` behind a prompt that is read at once, under the press of the arm."""
    cache = prefilled(model, arm, tokens[:prompt], len(tokens))
    places = torch.arange(len(tokens), device=tokens.device)
    pieces = zip(tokens[prompt:].split(PIECE), places[prompt:].split(PIECE), strict=True)
    parts = [model(piece[None], past_key_values=cache, position_ids=at[None]).logits[0] for piece, at in pieces]
    return torch.cat(parts)


Kept = dict[str, dict[str, list[Any]]]
"""What was read: by part, by the name of the arm, a number for each text in their order."""
PARTS = ("behind", "needles")
"""Windows read behind a prompt, nats of the tokens that count; needles found in each haystack."""


def needles_in(length: int) -> int:
    """How many needles are hidden in a window of so many tokens."""
    return min(NEEDLES, most(length))


def texts(windows: int) -> dict[str, int]:
    """How many texts each arm reads in each part."""
    return dict(zip(PARTS, (windows, min(HAYSTACKS, windows)), strict=True))


def read_more(model: Any, arms: Sequence[Arm], windows: Tensor, kept: Kept, keep: Callable[[Arm], None]) -> None:
    """Read what was not read yet, arm by arm, and call `keep` after each text.

    Args:
        model: A causal LM.
        arms: The caches; the first is the one that the others are compared with.
        windows: `[windows, tokens]` of a text.
        kept: What was read before, filled in here.
        keep: Told the arm when a text more is in `kept`.
    """
    size = windows.shape[1]
    generator = torch.Generator().manual_seed(0)
    haystacks = [build(window.cpu(), needles_in(size), generator) for window in windows[:HAYSTACKS]]

    def nats(arm: Arm, number: int) -> float:
        window, prompt = windows[number], size // 2
        return float(score_tokens((read(model, arm, window, prompt)[:-1],), window[prompt + 1 :]).nll[0].sum())

    def found(arm: Arm, number: int) -> int:
        haystack = haystacks[number]
        prompt = min(haystack.answers) - KEY
        logits = read(model, arm, haystack.tokens.to(windows.device), prompt)
        starts = [answer - prompt - 1 for answer in haystack.answers]
        return sum(
            is_found(haystack, needle, logits[at : at + VALUE].argmax(-1).tolist()) for needle, at in enumerate(starts)
        )

    ways: dict[str, Callable[[Arm, int], float]] = {"behind": nats, "needles": found}
    for arm in arms:
        for part, count in texts(len(windows)).items():
            done = kept.setdefault(part, {}).setdefault(arm.name, [])
            for number in range(len(done), count):
                done.append(ways[part](arm, number))
                keep(arm)


def compared(kept: Kept, arms: Sequence[Arm], windows: int, window: int) -> list[dict[str, Any]]:
    """Rows of the arms that have read every text: loss over each cache less that over the first, and needles found.

    Losses are nats/token, with their upper bound.
    """
    wanted = texts(windows).items()
    whole = [arm for arm in arms if all(len(kept.get(part, {}).get(arm.name, ())) == count for part, count in wanted)]
    rows = []
    for arm in whole if arms[0] in whole else []:
        own, beside = (np.array(kept["behind"][one.name]) for one in (arm, arms[0]))
        ratio = clustered_ratio(own - beside, np.full(windows, window - window // 2 - 1))
        haystacks = kept["needles"][arm.name]
        loss = {"cache": arm.name, "delta_nll": ratio.mean, "upper": ratio.upper(CONFIDENCE), "windows": windows}
        rows.append(loss | {"found": sum(haystacks), "needles": needles_in(window) * len(haystacks)})
    return rows
