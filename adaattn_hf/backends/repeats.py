"""Whether calls stand for hundreds like them, as timed ones do: then what pays after so many is done at the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _Asked:
    """By whom it was asked for, of whatever thread: to do it early changes no result."""

    times = 0


def asked() -> bool:
    """Whether calls are made `as_if_repeated` now."""
    return _Asked.times > 0


@contextmanager
def as_if_repeated() -> Iterator[None]:
    """Within it, a call leaves behind what it would after hundreds of its kind."""
    _Asked.times += 1
    try:
        yield
    finally:
        _Asked.times -= 1
