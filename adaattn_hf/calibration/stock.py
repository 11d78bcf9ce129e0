"""How far two stock implementations of attention lie apart in the model's dtype: what rounding alone does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..attention.request import AttentionRequest, CallSpec
from ..attention.tap import tapping
from ..backends import select
from ..stats.paired import score_tokens
from .inputs import Inputs

TOKENS = 1024
"""Tokens compared: the eager implementation holds the whole score matrix."""


@dataclass(frozen=True)
class StockDistance:
    """Eager and sdpa attention beside one another.

    Attributes:
        flips: Share of tokens whose likeliest token differs.
        kl: Mean KL, nats/token; nothing that counts in float32.
    """

    flips: float
    kl: float


@torch.no_grad()
def stock_distance(inputs: Inputs) -> StockDistance:
    """Returns how far eager and sdpa attention lie apart.

    A layer that one of them cannot compute (a softcap, say) uses the backend that is chosen for it.
    """
    arms = inputs.arms
    length = min(inputs.samples)
    reading = inputs.readings(inputs.samples[length].joint[0])[0]
    tokens = reading.tokens[:, :TOKENS]

    def hidden(backend: str) -> Tensor:
        def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
            refused = bool(select.refusals_of(backend, CallSpec.of(request, look=True)))
            return select.attend(request, None if refused else backend).out

        with tapping(tap):
            return arms.hidden(tokens)

    scores = [
        score_tokens((eager[0], sdpa[0]), sdpa[0].argmax(-1))
        for _, (eager, sdpa) in arms.chunks(hidden("eager"), hidden("sdpa"))
    ]
    agree, kl = (np.concatenate([getattr(one, name)[0] for one in scores]) for name in ("agree", "kl"))
    return StockDistance(float((~agree).mean()), float(kl.mean()))
