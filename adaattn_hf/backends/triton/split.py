"""How the keys of a step are shared out among the programs of its launch."""

from __future__ import annotations

from typing import NamedTuple

from ...attention.heads import HeadWindows


class Split(NamedTuple):
    """Into how many shares the keys of a head are split.

    Attributes:
        most: Shares of the head that reads most.
        span: Keys of a share, where heads read unlike many.
    """

    most: int
    span: int


def split(
    windows: HeadWindows | None,
    kv_heads: int,
    kv_len: int,
    sequences: int,
    programs: int,
    least: int,
    whole: bool,
) -> Split:
    """Splits the keys of each head; the same for `least` lengths in a row, so that steps of a generation round alike.

    Args:
        windows: Of `head_windows`.
        kv_heads: Key/value heads.
        kv_len: Keys of a sequence.
        sequences: Sequences that are read alike.
        programs: As many as the device runs at once; there are no more shares unless each head has one.
        least: Fewest keys worth a program.
        whole: Whether every head may have to read all keys, where windows end.
    """
    length = -(-kv_len // least) * least
    if windows is None or whole:
        counts = [length]
    else:
        counts = [max(1, min(window + sinks, length)) for window, sinks in dict.fromkeys(windows)]
    longest = max(counts)
    slots = programs // sequences
    if len(counts) == 1:
        slots //= kv_heads
    else:
        # every head may have a share that is not full
        total = sum(min(window + sinks, length) for window, sinks in windows or ())
        slots = (slots - kv_heads) * longest // total
    most = max(1, min(longest // least, slots))
    span = -(-longest // most)
    return Split(-(-longest // span), span)
