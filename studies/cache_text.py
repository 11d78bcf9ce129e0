"""What caches cost on text: the loss over each, in pieces and behind a prompt, and needles hidden in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaattn_hf.calibration.needles import KEY, VALUE, build, is_found, most
from adaattn_hf.stats.paired import clustered_ratio, score_tokens

STOCK = "DynamicCache"
PIECE = 64
"""Tokens that are read at a time."""
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


@torch.no_grad()
def read(model: Any, arm: Arm, tokens: Tensor, prompt: int) -> Tensor:
    """Logits `[n - prompt, vocab]` of tokens `[n]` behind a prompt that is read at once, under the press of the arm."""
    model.set_attn_implementation(arm.implementation)
    cache = arm.make(model, len(tokens))
    places = torch.arange(len(tokens), device=tokens.device)
    # presses know a prompt by a keyword that Transformers no longer sends by itself
    more = {} if arm.press is None else {"cache_position": places[:prompt]}
    with nullcontext() if arm.press is None else arm.press()(model):
        model(tokens[None, :prompt], past_key_values=cache, **more)
    pieces = zip(tokens[prompt:].split(PIECE), places[prompt:].split(PIECE), strict=True)
    parts = [
        model(piece[None], past_key_values=cache, position_ids=at[None]).logits[0] for piece, at in pieces
    ]
    return torch.cat(parts)


def _paired(model: Any, arms: Sequence[Arm], windows: Tensor, prompt: int) -> list[dict[str, Any]]:
    """Loss behind prompts over each cache less that over `DynamicCache`, nats/token."""
    stock = next(arm for arm in arms if arm.name == STOCK)
    deltas: dict[str, list[float]] = {arm.name: [] for arm in arms if arm is not stock}
    for window in windows:
        exact = read(model, stock, window, prompt)[:-1]
        for arm in arms:
            if arm is not stock:
                score = score_tokens((exact, read(model, arm, window, prompt)[:-1]), window[prompt + 1 :])
                deltas[arm.name].append(float(score.delta[0].sum()))
    rows = []
    for name, sums in deltas.items():
        ratio = clustered_ratio(np.array(sums), np.full(len(sums), windows.shape[1] - prompt - 1))
        rows.append(
            {"cache": name, "delta_nll": ratio.mean, "upper": ratio.upper(CONFIDENCE), "windows": len(sums)}
        )
    return rows


def losses(model: Any, arms: Sequence[Arm], windows: Tensor) -> list[dict[str, Any]]:
    """Loss over each cache less that over `DynamicCache`, of windows `[windows, tokens]` of a text read in pieces."""
    return _paired(model, [arm for arm in arms if arm.press is None], windows, PIECE)


def behind_prompts(model: Any, arms: Sequence[Arm], windows: Tensor) -> list[dict[str, Any]]:
    """The same of the second half of each window behind the first, and the needles found in some of them."""
    rows = _paired(model, arms, windows, windows.shape[1] // 2)
    rows.insert(0, {"cache": STOCK, "delta_nll": 0.0, "upper": 0.0, "windows": len(windows)})
    names = {arm.name: arm for arm in arms}
    count = min(NEEDLES, most(windows.shape[1]))
    generator = torch.Generator().manual_seed(0)
    haystacks = [build(window.cpu(), count, generator) for window in windows[:HAYSTACKS]]
    for row in rows:
        found = 0
        for haystack in haystacks:
            prompt = min(haystack.answers) - KEY
            logits = read(model, names[row["cache"]], haystack.tokens.to(windows.device), prompt)
            for needle, answer in enumerate(haystack.answers):
                at = answer - prompt - 1
                found += is_found(haystack, needle, logits[at : at + VALUE].argmax(-1).tolist())
        row |= {"found": found, "needles": count * len(haystacks)}
    return rows
