"""Types what docs/first_hour.md types in a new environment, and writes docs/results/first_hour.*: minutes per task.

`python -m studies.first_hour SHELF PYTHON...`: SHELF holds what the page takes for granted beside the checkout (a GGUF
model, alice.txt). A block that ends otherwise than the page shows is named in the table.
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
BLOCK = re.compile(r"^## (.+?)$|^```bash\n(.*?)^```(?:\n\n```text\n(error:)?)?", re.MULTILINE | re.DOTALL)


def tasks() -> list[tuple[str, str, bool]]:
    """Returns what a newcomer types: the heading, the commands, and whether the page shows a refusal."""
    demo = (
        "README: `make demo`, then the environment of the page",
        "make -C adaattn-hf demo\npython -m venv hour",
        False,
    )
    page, heading, found = (ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8"), "", [demo]
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
    """Types everything in an empty directory beside a copy of the checkout. Returns seconds and the end of each block."""
    rows = []
    with TemporaryDirectory() as place:
        copied = Path(place, "adaattn-hf")
        subprocess.run(["git", "clone", "-q", ROOT, copied], check=True)
        for thing in shelf.iterdir():
            Path(place, thing.name).symlink_to(thing)
        path = f"{Path(python).parent}:{place}/hour/bin:" + os.environ["PATH"]
        for heading, code, refusal in tasks():
            path = f"{place}/hour/bin:{path}" if Path(place, "hour").exists() else path
            began = time.monotonic()
            done = subprocess.run(["bash", "-eu", "-c", code], cwd=place, env={**os.environ, "PATH": path},
                                  capture_output=True, text=True)  # fmt: skip
            row = {"task": heading, "command": code, "seconds": time.monotonic() - began, "refused": refusal}
            rows.append({**row, "end": done.returncode, "said": done.stderr[-2000:]})
            print(f"{row['seconds']:7.1f} s  {done.returncode}  {code.splitlines()[0]}", flush=True)
    return rows


def page(report: dict[str, Any]) -> str:
    """The table: a row per block, a column per Python; what ended otherwise than the page shows is named."""
    head, *more = report["walks"].values()
    rows = [
        (first["task"], f"`{first['command'].strip().splitlines()[-1 if first['command'].startswith('make') else 0]}`",
         *(f"{one['seconds'] / 60:.1f}" + ("" if bool(one["end"]) == one["refused"] else f" **ended with {one['end']}**")
           for one in (first, *others)))
        for first, *others in zip(head, *more, strict=True)
    ]  # fmt: skip
    totals = [f"**{sum(one['seconds'] for one in walked) / 60:.1f}**" for walked in report["walks"].values()]
    made = report["provenance"]
    said = f"Minutes by the clock, on {machine(made)}, commit {commit(made)}; the machine had nothing else to do."
    lines = [
        "# A first hour, in minutes",
        "",
        "What [a first hour](../first_hour.md) types, in a new environment per Python.",
        said,
        "",
    ]
    lines += table(("task", "first line", *report["walks"]), [*rows, ("all", "", *totals)])[:-1]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    walks = {
        f"Python {Path(one).name.removeprefix('python')}": walk(one, Path(sys.argv[1]).resolve())
        for one in sys.argv[2:]
    }
    report = {"provenance": provenance(torch.device("cpu")), "walks": walks}
    for name, text in (("json", json_text(report, indent=1) + "\n"), ("md", page(report))):
        write_atomically(ROOT / "docs" / "results" / f"first_hour.{name}", text)
