"""Shadowing: computes the first calls of each kind a second time by plain operations, and compares the results.

    model.config.adaattn = {"shadow": 2}                          # raise where they differ: for tests and CI
    model.config.adaattn = {"shadow": 2, "mismatch": "warn"}      # say so and go on: for production

A model without a plan is compared with `attention.reference`, a model with a plan with the same plan on the eager
backend: shadowing checks kernels, not the loss of a plan, which calibration verifies and `monitor` watches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import some_rows
from adaattn_hf.attention.kind import CallKind
from adaattn_hf.attention.listeners import Listener
from adaattn_hf.backends.select import choose
from adaattn_hf.config import AdaAttnConfig
from adaattn_hf.errors import warn
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer

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


@dataclass(eq=False)
class Shadow(Listener):
    """Compares a call of a layer under a plan with the reference, if it is one of the first of its kind."""

    bound_layer: BoundLayer | None
    settings: AdaAttnConfig

    @torch.no_grad()
    def after(self, module: nn.Module, call: AttentionCall, out: Tensor) -> None:
        """Compare; ShadowMismatch where the outputs differ by more than rounding explains, or a warning."""
        if call.dropout:
            return
        kind = call.checked_kind()._replace(keys=0, kv_bytes=0, pairs=0)  # a growing cache is one kind
        counts: Counter[CallKind] = module.__dict__.setdefault(_SLOT, Counter())
        counts[kind] += 1
        if counts[kind] > self.settings.shadow:
            return
        structure, call = call.structure, call.dequantised()  # what a cache stores as codes
        if self.bound_layer is None:
            places = torch.linspace(
                0, structure.q_len - 1, min(ROWS, structure.q_len), dtype=torch.float32, device=out.device
            )
            rows = places.round().long().to(out.device)
            expected, out, allowed = reference.attention(some_rows(call, rows)).out, out[:, rows], TOLERANCE[out.dtype]
        elif call.query.shape[:3].numel() * structure.kv_len > _MOST_WEIGHTS:
            warn(
                f"shadow: a planned call of {structure.q_len} queries and {structure.kv_len} keys was "
                "not compared, its weights would not fit; shorter calls of this model are",
                RuntimeWarning,
            )
            return
        else:
            expected = execute.attend(self.bound_layer, call, "eager").out
            allowed = max(PLANNED_TOLERANCE, TOLERANCE[out.dtype])
        expected, out = expected.double(), out.double()
        size = expected.square().sum((1, 3)).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        error = float(((out - expected).square().sum((1, 3)).sqrt() / size).max())
        if error <= allowed:  # false for NaN, too
            return
        sentence = (
            f"shadow: layer {getattr(module, 'layer_idx', None)} of {type(module).__name__} on "
            f"{choose(kind, call.backend).name} is off by {error:.3g} of the output's size, expected at most "
            f"{allowed:g} ({kind.words()}{', planned' if self.bound_layer is not None else ''}); "
            'load the model with attn_implementation="adaattn_sdpa" or "sdpa" and report this sentence'
        )
        if self.settings.mismatch == "raise":
            raise ShadowMismatch(sentence)
        warn(sentence, RuntimeWarning)
