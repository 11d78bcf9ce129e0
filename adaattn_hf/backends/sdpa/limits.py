"""Measured thresholds: sizes from which another way of calling torch's kernels is faster.

Measured on two AVX-512 cores; `adaattn bench` shows what they do elsewhere.
"""

from __future__ import annotations

from ..base import SMALL_PAIRS as SMALL_PAIRS

MASKED_PAIRS = 1 << 18
"""Pairs up to which one masked call is weighed against the calls of a program."""

MASKED_PAIRS_CUDA = 1 << 22
"""The same on CUDA, where a call costs as much as millions of pairs."""

GATHERED_RUNS = 2
"""Runs up to which calls on views of them are no slower than gathering them for one call, on CUDA."""

FEW_ROWS = 48
"""Queries up to which a causal run behind a past is one masked call; above, the past and the square are merged."""

WINDOW_ROWS = 64
"""Rows of a band of a window, forward; short bands compute fewer hidden pairs."""

WINDOW_ROWS_GRADIENT = 128
"""The same where a backward pass follows, which walks the bands one by one."""

BAND_ROWS = 256
"""Rows of a band with a mask of its own."""

TILE = 1 << 19
"""Score elements that the written-out kernel holds at a time."""

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

CPU_RATE = 6e10
"""Operations per second and thread of the fused CPU kernel."""

CUDA_RATE, CUDA_RATE_FP32 = 1e14, 2e13
"""Operations per second of a CUDA kernel, in half and in single precision."""

CPU_CALL, CUDA_CALL = 25e-6, 6e-5
"""Seconds that one more call costs."""
