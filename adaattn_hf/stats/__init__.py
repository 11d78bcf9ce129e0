"""Measuring, never deciding: statistics of attention, all O(n * s) with s sampled query rows."""

from __future__ import annotations
