"""Sizes from which another way of calling torch's operator is faster, measured on two AVX-512 cores."""

from __future__ import annotations

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
