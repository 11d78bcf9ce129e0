"""Types what docs/first_hour.md types in a new environment, and writes docs/results/first_hour.*: minutes per task.

`python -m studies.first_hour SHELF CONDITIONS PYTHON`: SHELF holds what the page takes for granted beside the
checkout (a GGUF model, alice.txt), CONDITIONS say what else the machine did. torch is that of the constraints, from
pip's index, for CPUs where it has that. A block that ends otherwise than the page shows is named in the table.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.eval.provenance import provenance

from .pages import commit, machine, table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
BLOCK = re.compile(r"^## (.+?)$|^```bash\n(.*?)^```(?:\n\n```text\n(error:)?)?", re.MULTILINE | re.DOTALL)


def tasks() -> list[tuple[str, str, bool]]:
    """Returns what a newcomer types: the heading, the commands, and whether the page shows a refusal."""
    found = [
        ("README: the demo's environment", "make -C adaattn-hf .venv-demo/.ready PYTHON=python", False),
        ("README: the demo, three models", "make -C adaattn-hf demo PYTHON=python", False),
        ("What is here", "python -m venv hour", False),
    ]
    page, heading = (ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8"), ""
    (pin,) = re.findall(r"^torch==.*$", (ROOT / "constraints-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    page = re.sub(r"pip install torch --index-url \S+", f"pip install {pin}+cpu || pip install {pin}", page)
    for title, code, refusal in BLOCK.findall(page):
        heading = title or heading
        if code:
            found.append((heading, code, bool(refusal)))
        elif title == "A model by its name":
            start = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").partition("## 4.")[0]
            python = "".join(re.findall(r"^```python\n(.*?)^```", start, re.MULTILINE | re.DOTALL))
            found.append((heading, f"python - <<'QUICKSTART'\n{python}\nQUICKSTART\n", False))
        elif title == "A model of one's own":
            found.append((heading, "pip install gguf accelerate", False))
    return found


def walk(python: str, shelf: Path) -> list[dict[str, Any]]:
    """Types everything in an empty directory beside a copy of the checkout. Returns seconds and end of each block."""
    rows = []
    with TemporaryDirectory() as place:
        copied = Path(place, "adaattn-hf")
        subprocess.run(["git", "clone", "-q", ROOT, copied], check=True)  # noqa: S603, S607  (this checkout)
        for thing in shelf.iterdir():
            Path(place, thing.name).symlink_to(thing)
        path = f"{Path(python).parent}:{place}/hour/bin:" + os.environ["PATH"]
        for heading, code, refusal in tasks():
            path = f"{place}/hour/bin:{path}" if Path(place, "hour").exists() else path
            began = time.monotonic()
            command, there = ["bash", "-eu", "-c", code], {**os.environ, "PATH": path}
            done = subprocess.run(command, cwd=place, env=there, capture_output=True, text=True)  # noqa: S603  (the page)
            row = {"task": heading, "command": code, "seconds": time.monotonic() - began, "refused": refusal}
            rows.append({**row, "end": done.returncode, "said": done.stderr[-2000:]})
            print(f"{row['seconds']:7.1f} s  {done.returncode}  {code.splitlines()[0]}", flush=True)
    return rows


def page(walks: dict[str, Any]) -> str:
    """The table: a row per block, a column per Python; what ended otherwise than the page shows is named."""
    rows, blocks = [], {name: walked["blocks"] for name, walked in walks.items()}
    for same in zip(*blocks.values(), strict=True):
        ended = [f" **ended with {one['end']}**" * (bool(one["end"]) != one["refused"]) for one in same]
        minutes = [f"{one['seconds'] / 60:.1f}{end}" for one, end in zip(same, ended, strict=True)]
        rows.append((same[0]["task"], f"`{same[0]['command'].splitlines()[0]}`", *minutes))
    rows.append(("all", "", *(f"{sum(one['seconds'] for one in own) / 60:.1f}" for own in blocks.values())))
    lines = [
        "# A first hour, in minutes",
        "",
        "By the clock, for [a first hour](../first_hour.md) in new environments.",
        "",
    ]
    for name, walked in walks.items():
        made = walked["provenance"]
        lines.append(f"* {name}: {machine(made)}, {walked['conditions']}, commit {commit(made)}.")
    return "\n".join([*lines, "", *table(("task", "first line", *walks), rows)[:-1]]) + "\n"


if __name__ == "__main__":
    _, shelf, conditions, python = sys.argv
    kept = RESULTS / "first_hour.json"
    walks = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    made = {"provenance": provenance(torch.device("cpu")), "conditions": conditions}
    walks[f"Python {python.rpartition('python')[2]}"] = {**made, "blocks": walk(python, Path(shelf).resolve())}
    write_atomically(kept, json_text(walks, indent=1) + "\n")
    write_atomically(RESULTS / "first_hour.md", page(walks))
