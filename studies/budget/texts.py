"""Text of another kind for the budget study: the modules of Python's own standard library, as documents of code.

`python -m studies.budget.texts TARGET.jsonl`: one line a module, in the order of their names, until there are enough
characters. The same Python version writes the same file.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "encodings", "distutils"}
"""Directories of tables and tests, and what not every version or distribution has."""
SHORTEST = 2_000
"""Characters of a module worth reading; shorter ones are lists of names."""
EVERY = 5_000_000
"""Characters that are enough for samples of whole contexts."""


def modules(library: Path, enough: int = EVERY) -> list[dict[str, str]]:
    """Returns the modules of a library's directory as records of name and text, up to `enough` characters.

    Args:
        library: The directory.
        enough: Characters behind which no further module is read.
    """
    found: list[dict[str, str]] = []
    size = 0
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if LEFT_OUT.intersection(name.parts) or size >= enough:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= SHORTEST:
            found.append({"name": name.as_posix(), "text": text})
            size += len(text)
    return found


def main(target: Path) -> None:
    """Writes the modules of the Python that runs this."""
    from adaattn_hf._files import write_atomically

    records = modules(Path(sysconfig.get_path("stdlib")))
    write_atomically(target, "".join(json.dumps(record) + "\n" for record in records).encode())
    print(f"{len(records)} modules, {sum(len(one['text']) for one in records)} characters: {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
