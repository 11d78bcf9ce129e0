"""Puts later speeds of the same plans into a study: `python -m studies.budget.renewed STUDY.json SPEED.json`.

Cells of the later file replace those of the same level and shape; the page says of each when it was timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaattn_hf.errors import UsageError

from .report import write_page
from .speed import LEVELS
from .study import write

_SAME = ("model", "dtype", "data")
_CLOSE = 1e-2
"""Relative difference that the KL of one plan on one text may have in two runs: kernels that add up in another order
have changed it by 0.005 in bfloat16."""


def renewed(study: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a study with the cells of a later file of `speed`.

    Args:
        study: What `report` merged.
        later: What `speed` wrote.

    Raises:
        UsageError: The file is of another model, dtype or text, or times other plans.
    """
    speed = {**study["speed"]}
    for name in _SAME:
        if speed["settings"][name] != later["settings"][name]:
            raise UsageError(
                f"{name}: got {later['settings'][name]}, expected that of the study, {speed['settings'][name]}"
            )
    notes = {**speed.get("renewed", {})}
    for level in LEVELS:
        cells = {**speed.get(level, {})}
        for shape, arms in later.get(level, {}).items():
            before = cells.get(shape, arms)
            for name in {*before, *arms}:
                kls = [one.get(name, {}).get("kl") for one in (before, arms)]
                if name not in before or name not in arms or not _alike(*kls):
                    raise UsageError(
                        f"{level} {shape}, {name}: got a KL of {kls[1]}, expected the study's plan, {kls[0]}"
                    )
            cells[shape] = dict(arms)
            notes[f"{level}, {shape}"] = {"settings": later["settings"], "provenance": later["provenance"]}
        if cells:
            speed[level] = cells
    return {**study, "speed": {**speed, "renewed": notes}}


def _alike(first: float | None, second: float | None) -> bool:
    """Whether both are no KL, or one plan's."""
    if first is None or second is None:
        return first is second
    return abs(first - second) <= _CLOSE * first


def main(target: Path, later: Path) -> None:
    """Renews a study's JSON and the page beside it."""
    write(target, renewed(*(json.loads(path.read_text(encoding="utf-8")) for path in (target, later))))
    write_page(target, target.with_suffix(".md"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
