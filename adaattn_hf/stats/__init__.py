"""Statistics of attention from s sampled query rows against all n keys, O(n * s). They measure and decide nothing."""

from __future__ import annotations
