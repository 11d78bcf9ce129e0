"""Sizes from which another way of calling torch's operator is faster, measured on two AVX-512 cores and one H100."""

from __future__ import annotations

import torch

from ...attention.request import CallSpec

WINDOW_ROWS = 128
"""Rows of a band under a window; short bands compute fewer hidden pairs."""

BAND_ROWS, LEAST_ROWS = 256, 32
"""Rows of any other band, those of all batch rows together, and the fewest that fill a tile of a kernel."""

SCORES = 1 << 24
"""Scores of all heads that a band holds where torch writes them out: softcaps, learned sinks, gradients of a bias."""

SHORT_KEYS = 128
"""Keys up to which one query is served by the plain operator, which is quicker than anything around it."""

VECTOR_KEYS = 16
"""Scores that the widest vector of a processor holds; not measured."""

FOLD_BYTES = 100_000_000
"""Bytes of fp32 keys and values beyond which reading them is all that counts, folded heads or not."""

FEW_KEYS_HALF = 384
"""Half-precision keys up to which one query of ungrouped heads stays with the fused kernel."""

PADDING_SHARE = 0.25
"""Share of padding among the keys of a decode step from which batch rows are walked one by one."""

KEPT_BYTES = 1 << 28
"""Bytes of masks that are kept for all layers; beyond, each layer makes them again."""

MASKED_PRODUCTS = 1 << 33
"""Products of numbers, pairs of all heads times their channels, below which training over runs in half precision is one
call with a mask on a CUDA device: such steps wait for the host, which launches torch's kernels sooner than ours. Found
by whole steps of BERT-base and of a model shaped like Qwen2.5-0.5B on an H100."""


def masked_in_training(spec: CallSpec) -> bool:
    """Whether a mask is the quickest for a call over runs with gradients."""
    plain = not (spec.per_head or spec.softcap or spec.sink_logits or spec.need_lse or spec.compiling)
    light = 0 < spec.pairs * (spec.head_dim + spec.head_dim_v) < MASKED_PRODUCTS
    ours = spec.device == "cuda" and spec.dtype != torch.float32
    return spec.needs_grad and spec.kind == "ragged" and plain and light and ours
