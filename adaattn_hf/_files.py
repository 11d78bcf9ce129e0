"""Files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes a file, text in UTF-8, that is either the old one or the new one and never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(fresh, path)
