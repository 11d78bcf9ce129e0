"""Names from outside, such as those of files and models, written so that they bring no markup to a page or terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaattn_hf._files import printable

_MARKUP = {ord(character): f"&#{ord(character)};" for character in "|<["}


def harmless(record: Any) -> Any:
    """A record whose texts, keys too, bring no tag, link or table cell of their own to a page, and stay on one line."""
    if isinstance(record, str):
        return printable(record).translate(_MARKUP)
    if isinstance(record, Mapping):
        return {harmless(key): harmless(value) for key, value in record.items()}
    return [harmless(value) for value in record] if isinstance(record, (list, tuple)) else record
