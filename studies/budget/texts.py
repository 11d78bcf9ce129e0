"""Text of other kinds for studies of budgets: modules of Python, or any other files of a directory, as documents.

`python -m studies.budget.texts TARGET.jsonl [DIRECTORY [PATTERN]]`: one line a file, in the order of their names, until
there are enough characters; without a directory the modules of Python's own standard library. The same version of the
files writes the same text.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from adaattn_hf._files import write_atomically

LEFT_OUT = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "encodings", "distutils"}
"""Directories of tables and tests, and what not every version or distribution has."""
SHORTEST = 2_000
"""Characters of a document worth reading; shorter ones are lists of names."""
EVERY = 5_000_000
"""Characters that are enough for samples of whole contexts."""


def documents(library: Path, pattern: str = "*.py", enough: int = EVERY) -> list[dict[str, str]]:
    """Returns the files of a directory as records of name and text, up to `enough` characters."""
    found: list[dict[str, str]] = []
    size = 0
    for path in sorted(library.rglob(pattern)):
        name = path.relative_to(library)
        if LEFT_OUT.intersection(name.parts) or size >= enough:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= SHORTEST:
            found.append({"name": name.as_posix(), "text": text})
            size += len(text)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the files of a directory, or the modules of the Python that runs this."""
    parser = argparse.ArgumentParser(prog="python -m studies.budget.texts", description=__doc__)
    for name, default in (("target.jsonl", None), ("directory", sysconfig.get_path("stdlib")), ("pattern", "*.py")):
        parser.add_argument(name, nargs="?" if default else None, default=default)
    target, directory, pattern = vars(parser.parse_args(argv)).values()
    records = documents(Path(directory), pattern)
    write_atomically(Path(target), "".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} documents, {sum(len(one['text']) for one in records)} characters: {target}")


if __name__ == "__main__":
    main()
