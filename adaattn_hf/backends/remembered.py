"""A thread-safe LRU cache with limits on entries and bytes, for what calls of one shape need again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

Made = TypeVar("Made")


class Remembered:
    """A least-recently-used cache.

    Args:
        entries: Most entries.
        most_bytes: Most bytes of all of them; one that is larger by itself is not kept.
    """

    def __init__(self, entries: int, most_bytes: int = 0) -> None:
        self._entries, self._most, self._bytes = entries, most_bytes, 0
        self._lock = threading.Lock()
        self._made: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()

    def get(
        self, key: Hashable, make: Callable[[], Made], size: Callable[[Made], int] = lambda made: 0
    ) -> Made:
        """Returns what `make` returned for the key, made now if it is not kept.

        Args:
            key: Whatever the result depends on.
            make: Makes it.
            size: Its bytes.
        """
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
                return found[0]  # type: ignore[return-value]
        made = make()
        taken = size(made)
        with self._lock:
            if (taken <= self._most or not taken) and key not in self._made:
                self._made[key] = made, taken
                self._bytes += taken
            while len(self._made) > self._entries or self._bytes > self._most:
                self._bytes -= self._made.popitem(last=False)[1][1]
        return made
