"""Attention over quantised keys and values, to measure the loss of a cache format in a teacher-forced pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..attention.request import AttentionRequest
from ..attention.stored import BITS, StoredKV, direction_of, hadamard, quantise
from ..attention.tap import Tap
from ..plans.program import Program
from .arms import plan_tap

FIRST = 64
"""First tokens whose keys give the mean that is subtracted, as a cache does for a short prompt."""


def stored_tap(programs: Mapping[int, Program], stored: str) -> Tap:
    """Returns a `plan_tap` that computes over keys and values as a cache of the format `stored` keeps them."""
    tap = plan_tap(programs)
    return tap if stored == "model" else lambda module, request: tap(module, over_codes(request, stored))


def over_codes(request: AttentionRequest, stored: str) -> AttentionRequest:
    """Returns the request with keys and values quantised as a cache would."""
    key, value = request.key, request.value
    first = key[:, :, :FIRST].float()
    mean = (first.mean(dim=2) @ hadamard(key.shape[3], key.device)).contiguous()
    along = direction_of(request.query[:, :, :FIRST], key.shape[1])
    keys, key_scale = quantise(key, mean=mean, along=along)
    values, value_scale = quantise(value, bits=BITS[stored])
    record = StoredKV(key_scale, value_scale, mean, key[:, :, 0].float().contiguous())
    return replace(request, key=keys, value=values, stored=record)
