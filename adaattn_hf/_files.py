"""Files that are whole or absent, JSON that every reader can read, and names that no terminal obeys."""

import json
import math
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes a file, text in UTF-8, that is either the old one or the new one and never half of it.

    The unfinished file has a name that nobody can foresee, and is gone where the disk is full. Pipes and devices
    (`/dev/stdout`) are written to, and not replaced by a file.
    """
    if "\0" in str(path):
        raise ValueError(f"path: got {str(path)!r}, expected one without a zero byte; give another")
    # bytes of a name that are not UTF-8 are written as JSON escapes them, and read back from JSON
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    descriptor, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        # such files are made for their owner alone; others may read as of any file that the process makes
        os.umask(mask := os.umask(0))
        os.chmod(fresh, 0o666 & ~mask)
        os.replace(fresh, path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)  # Ctrl-C may come when it has its name already
        raise


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text; ValueError for no JSON, one too deep or long, or a key that comes twice."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key may come twice: readers differ on which one counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ValueError(f"its key {twice!r:.60} comes twice in one object")
    return found


def json_text(value: Any, **layout: Any) -> str:
    """Returns a value as JSON, null for what is no finite number; `layout` are keywords of `json.dumps`."""
    return json.dumps(_finite(value), allow_nan=False, **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """Returns a text on one line, with control and formatting characters escaped so that no terminal obeys them."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )
