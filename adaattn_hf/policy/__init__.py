"""Deciding, never touching a tensor of a forward pass: risks, prices, allocation, back-off."""

from __future__ import annotations
