"""Decisions from measurements alone: risks, prices, allocation, back-off. Touches no tensor of a forward pass."""

from __future__ import annotations
