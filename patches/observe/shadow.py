"""Shadowing: computes the first calls of each kind a second time by plain operations, and compares the results.

    model.config.adaattn = {"shadow": 2}                          # raise where they differ: for tests and CI
    model.config.adaattn = {"shadow": 2, "mismatch": "warn"}      # say so and go on: for production

A model without a plan is compared with `attention.reference`, a model with a plan with the same plan on the eager
backend: shadowing checks kernels, not the loss of a plan, which calibration verifies and `monitor` watches.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention import reference
from adaattn_hf.attention.kind import CallSpec
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.slicing import some_rows
from adaattn_hf.backends.select import choose
from adaattn_hf.errors import warn

ROWS = 64
"""Query rows that are compared in a call without a plan."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Allowed error of a head's output in the Frobenius norm, relative to its size."""
PLANNED_TOLERANCE = 5e-2
"""The same under a plan, whose choices may round: two ways of rounding differ by about the rounding error."""
_MOST_WEIGHTS = 1 << 27
"""Largest number of attention weights of a planned call that is compared; larger calls give a warning instead."""


class ShadowMismatch(RuntimeError):
    """The output of a call differs from the reference."""


_SLOT = "_adaattn_shadow"
"""Attribute in which an attention module counts its calls by kind."""


@torch.no_grad()
def compare(
    module: nn.Module,
    request: AttentionRequest,
    forced: str | None,
    program: Any,
    out: Tensor,
    *,
    limit: int,
    action: str,
) -> None:
    """Compares a call's output with the reference, if the call is one of the first of its kind in this model.

    ShadowMismatch: they differ by more than rounding explains, and `action` is `raise`.
    """
    spec = request.checked_kind()._replace(keys=0, kv_bytes=0, pairs=0)  # a growing cache is one kind
    layer = getattr(module, "layer_idx", None)
    if request.dropout:
        return
    counts: Counter[CallSpec] = module.__dict__.setdefault(_SLOT, Counter())
    counts[spec] += 1
    if counts[spec] > limit:
        return
    request = request.widened()  # what a cache stores as codes
    if program is None:
        count = min(ROWS, request.structure.q_len)
        rows = (
            torch.linspace(0, request.structure.q_len - 1, count, dtype=torch.float32, device=out.device).round().long()
        )
        expected, answer = reference.attention(some_rows(request, rows)).out, out[:, rows]
        allowed = TOLERANCE[out.dtype]
    else:
        if request.query.shape[:3].numel() * request.structure.kv_len > _MOST_WEIGHTS:
            warn(
                f"shadow: a planned call of {request.structure.q_len} queries and {request.structure.kv_len} keys was "
                "not compared, its weights would not fit; shorter calls of this model are",
                RuntimeWarning,
            )
            return
        from adaattn_hf.plans import execute

        expected, answer = execute.attend(program, request, "eager").out, out
        allowed = max(PLANNED_TOLERANCE, TOLERANCE[out.dtype])
    expected, answer = expected.double(), answer.double()
    size = expected.square().sum((1, 3)).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    error = float(((answer - expected).square().sum((1, 3)).sqrt() / size).max())
    if error <= allowed:  # false for NaN, too
        return
    sentence = (
        f"shadow: layer {layer} of {type(module).__name__} on {choose(spec, forced).name} is off by {error:.3g} of the "
        f"output's size, expected at most {allowed:g} ({spec.words()}{', planned' if program is not None else ''}); "
        'load the model with attn_implementation="adaattn_sdpa" or "sdpa" and report this sentence'
    )
    if action == "raise":
        raise ShadowMismatch(sentence)
    warn(sentence, RuntimeWarning)
