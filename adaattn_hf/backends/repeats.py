"""Whether calls stand for hundreds like them, as timed ones do: then what pays after so many is done at the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked = ContextVar("_asked", default=False)


def asked() -> bool:
    """Whether calls are made `as_if_repeated` now."""
    return _asked.get()


@contextmanager
def as_if_repeated() -> Iterator[None]:
    """Within it, a call leaves behind what it would after hundreds of its kind."""
    before = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(before)
