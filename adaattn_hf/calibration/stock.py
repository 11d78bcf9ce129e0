"""How often two stock implementations of attention disagree on the likeliest token, in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention.request import AttentionRequest, CallSpec
from ..attention.tap import tapping
from ..backends import select
from ..stats.paired import score_tokens
from .inputs import Inputs

TOKENS = 1024
"""Tokens compared: the eager implementation holds the whole score matrix."""


@torch.no_grad()
def stock_flips(inputs: Inputs) -> float:
    """Returns the share of tokens whose likeliest token differs between eager and sdpa attention.

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

    flips = total = 0
    for _, (eager, sdpa) in arms.chunks(hidden("eager"), hidden("sdpa")):
        agree = score_tokens((eager[0], sdpa[0]), sdpa[0].argmax(-1)).agree[0]
        flips, total = flips + int((~agree).sum()), total + len(agree)
    return flips / total
