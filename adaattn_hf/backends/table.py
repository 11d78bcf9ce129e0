"""A table of measured backends: for which calls it speaks, when one is clearly faster, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..attention.request import CallSpec

FORMAT = 1
MARGIN = 1.03
"""How many times as fast a backend must be, in the median, to be taken before the first of the order."""
LONGEST = {"cpu": 4096, "cuda": 32768}
"""Longest classes by device; see `longest_of`."""

Times = dict[str, list[tuple[float, float, float]]]
"""Backend to microseconds of each probe: first quartile, median, third quartile."""


class TableError(ValueError):
    """A table that cannot be used here; says which, why, and the remedy."""


class Cell(NamedTuple):
    """A class of calls. `work` is the class of the pairs (CUDA) or of the bytes of one query (CPU), 8 times wide."""

    kind: str
    dtype: str
    head_dim: int
    grouped: bool
    gradient: bool
    length: int
    work: int
    threads: int


def longest_of(device: str, kind: str) -> int:
    """Keys of a kind's longest class, as which all longer calls are taken to behave.

    One query on a CUDA device is measured behind four times as many: that takes microseconds, and which kernel shares
    the keys out best changes once more.
    """
    return LONGEST[device] * (4 if device == "cuda" and kind in ("step", "padded step") else 1)


def cell_of(spec: CallSpec) -> Cell | None:
    """The class of a call; None for calls that no table speaks for, whose order stands."""
    extras = (
        spec.dropout or spec.softcap or spec.sink_logits or spec.bias or spec.need_lse or spec.window_sinks
        or spec.per_head or spec.stored is not None or spec.head_dim != spec.head_dim_v
    )  # fmt: skip
    unread = spec.kind == "ragged" and spec.holes is None and not spec.decode
    unlike = spec.windowed and (spec.kind != "window" or spec.decode)
    if (
        extras
        or unread
        or unlike
        or not spec.length
        or spec.kind == "irregular"
        or spec.device not in LONGEST
    ):
        return None
    kind = spec.kind if not spec.decode else "padded step" if spec.kind == "ragged" else "step"
    size = spec.pairs if spec.device == "cuda" else spec.kv_bytes
    return Cell(
        kind, str(spec.dtype).removeprefix("torch."), spec.head_dim, spec.groups > 1, spec.needs_grad,
        min(spec.length, longest_of(spec.device, kind)), size.bit_length() // 3,
        torch.get_num_threads() if spec.device == "cpu" else 0,
    )  # fmt: skip


def clearly_faster(times: Mapping[str, Any], default: str) -> tuple[str, ...]:
    """Backends that beat `default` in every probe, by MARGIN in the median and beyond both spreads; best first."""
    first = times.get(default)
    if not first:
        return ()
    total = {name: sum(median for _, median, _ in probes) for name, probes in times.items()}
    names = [
        name for name, probes in times.items()
        if all(late < early and middle * MARGIN <= base
               for (early, base, _), (_, middle, late) in zip(first, probes, strict=True))
    ]  # fmt: skip
    return tuple(sorted(names, key=total.__getitem__))


@dataclass
class Table:
    """What was measured on one device, by class of call."""

    key: dict[str, str]
    cells: dict[Cell, Times] = field(default_factory=dict)

    def text(self) -> str:
        """What its file holds: a line per class."""
        rows = [json.dumps({**cell._asdict(), "times": times}) for cell, times in self.cells.items()]
        head = json.dumps({"format": FORMAT, "key": self.key}, indent=1).removesuffix("\n}")
        return head + ',\n "cells": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"

    @classmethod
    def read(cls, path: Path, key: Mapping[str, str]) -> Table:
        """The table of a file.

        Raises:
            TableError: It cannot be read, is damaged, or was measured under another key.
        """
        remedy = "measure anew with `adaattn tune`, or delete it with `adaattn tune --reset`"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found = data["key"] if data["format"] == FORMAT else {**data["key"], "format": data["format"]}
            table = cls(dict(found))
            for row in data["cells"]:
                times = {name: [_spread(p) for p in probes] for name, probes in row.pop("times").items()}
                if len({len(probes) for probes in times.values()}) > 1:
                    raise ValueError(f"{row} has backends with unlike probes")
                cell = Cell(**row)
                if [type(got) for got in cell] != [str, str, int, bool, bool, int, int, int]:
                    raise ValueError(f"{cell} has a field of another type")
                table.cells[cell] = times
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TableError(
                f"{path}: no table of measurements ({type(error).__name__}: {error}); {remedy}"
            ) from error
        differs = [n for n in sorted({*key, *table.key}) if key.get(n) != table.key.get(n)]
        if differs:
            was = ", ".join(
                f"{n} {table.key.get(n, 'absent')} (here {key.get(n, 'absent')})" for n in differs
            )
            raise TableError(f"{path}: measured under {was}; {remedy}")
        return table


def _spread(probe: Any) -> tuple[float, float, float]:
    """Quartiles of one probe.

    Raises:
        ValueError: They are no three positive numbers in order.
    """
    low, middle, high = (float(number) for number in probe)
    if not 0.0 < low <= middle <= high < float("inf"):
        raise ValueError(f"{probe} is no first quartile, median and third quartile")
    return low, middle, high
