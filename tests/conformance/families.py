"""Which families of Transformers are judged, by kind; the list itself is `families.yaml`."""

from __future__ import annotations

from pathlib import Path

import yaml

__all__ = ["FAMILIES", "WITHOUT_STOCK_SDPA"]

_listed: dict[str, str] = yaml.safe_load(
    (Path(__file__).parent / "families.yaml").read_text(encoding="utf-8")
)

WITHOUT_STOCK_SDPA = tuple(_listed.pop("without stock sdpa").split())
"""Families that declare that stock `sdpa` cannot serve them."""

FAMILIES: dict[str, tuple[str, ...]] = {kind: tuple(names.split()) for kind, names in _listed.items()}
"""Kind -> directories under Transformers' `tests/models`."""
