"""How far two stock implementations of attention lie apart in the model's dtype: what only rounding does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention.listeners import Tap, tapping
from ..attention.request import AttentionRequest
from ..backends import select
from .arms import compare
from .inputs import Inputs
from .scoring import Reading

TOKENS = 1024
"""Tokens compared: the eager implementation holds the whole score matrix."""


@dataclass(frozen=True)
class StockDistance:
    """Eager compared with sdpa attention: share of tokens whose likeliest token differs, and mean KL in nats/token.

    In float32 the KL does not count.
    """

    flips: float
    kl: float


@torch.no_grad()
def stock_distance(inputs: Inputs) -> StockDistance:
    """Returns how far eager and sdpa attention lie apart.

    A layer that one of them cannot compute (a softcap, say) uses the backend that is chosen for it.
    """
    arms = inputs.arms
    tokens = inputs.readings(inputs.samples[min(inputs.samples)].joint[0])[0].tokens[:, :TOKENS]

    def by(backend: str) -> Tap:
        def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
            refused = bool(select.refusals_of(backend, request.checked_kind(named=True)))
            return select.attend(request, None if refused else backend).out

        return tap

    with tapping(by("eager")):
        eager = arms.hidden(tokens)
    # every position counts, whatever token it is to predict
    scores = compare(arms, Reading(tokens, tokens[0]), by("sdpa"), eager)
    return StockDistance(float((~scores.agree).mean()), float(scores.kl.mean()))
