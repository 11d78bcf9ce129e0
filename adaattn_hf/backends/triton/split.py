"""How the keys of a step are shared out among the programs of its launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.heads import ALL, HeadWindows
from ..remembered import Remembered

_made = Remembered(256)
"""Tables of the last few kinds of steps, so that steps of one shape make theirs once."""
_of_graphs: dict[object, Shares] = {}
"""Those whose tables' addresses are in captured graphs, which are kept for good."""


class Shares(NamedTuple):
    """What each program of a step's launch reads.

    Attributes:
        table: int32 `[programs, 5]`, of each program (head, share, shares of that head, its window, its sinks); None
            where all heads read as many keys: a program tells its head by its number then.
        most: Shares of a head, the most of any.
        programs: Of a sequence.
        window: Of every head; without a meaning where there is a table.
        sinks: The same.
    """

    table: Tensor | None
    most: int
    programs: int
    window: int = ALL
    sinks: int = 0


def shares_of(
    windows: HeadWindows | None,
    kv_heads: int,
    kv_len: int,
    sequences: int,
    programs: int,
    least: int,
    device: torch.device,
    graph: bool = False,
    whole: bool = False,
) -> Shares:
    """Shares the keys out; the same for `least` lengths in a row, so that steps of a generation share a table.

    Args:
        windows: Of `head_windows`.
        kv_heads: Key/value heads.
        kv_len: Keys of a sequence.
        sequences: Sequences that are read alike.
        programs: As many as the device runs at once; there are no more unless each head has one.
        least: Fewest keys worth a program.
        device: Where the table goes.
        graph: Whether a graph will hold the table's address, so that it must not be dropped.
        whole: Whether every head may have to read all keys, where windows end.
    """
    length = -(-kv_len // least) * least
    if windows is None or len(set(windows)) == 1:
        window, sinks = windows[0] if windows else (ALL, 0)
        count = length if whole else max(1, min(window + sinks, length))
        most = max(1, min(count // least, programs // (kv_heads * sequences)))
        most = -(-count // -(-count // most))
        return Shares(None, most, kv_heads * most, window, sinks)
    key = windows, length, sequences, programs, least, device, whole
    found = _of_graphs.get(key) or _made.get(key, lambda: _apart(*key))
    if graph:
        _of_graphs[key] = found
    return found


def _apart(
    windows: HeadWindows,
    length: int,
    sequences: int,
    programs: int,
    least: int,
    device: torch.device,
    whole: bool,
) -> Shares:
    """Shares of heads that read unlike many keys, longest first."""
    counts = [length if whole else min(window + sinks, length) for window, sinks in windows]
    # as many shares of the longest head as leave all of them no more than the programs that run at once: one more would
    # have to wait until the others are done
    for most in range(max(1, min(max(counts) // least, programs)), 0, -1):
        span = -(-max(counts) // most)
        shares = [max(1, -(-count // span)) for count in counts]
        if sum(shares) * sequences <= programs:
            break
    order = sorted(range(len(windows)), key=lambda head: -counts[head])
    entries = [(head, i, shares[head], *windows[head]) for head in order for i in range(shares[head])]
    table = torch.tensor(entries, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
    return Shares(table, max(shares), len(entries))
