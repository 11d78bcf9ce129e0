"""The README's figures and picture, and the tables of docs/figures.md and comparison.md: `python -m studies.headline`.

All come from `docs/results/`; none is typed. `studies.front.page` refuses figures that lack an arm, a commit, a machine
or their conditions.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaattn_hf._files import write_atomically
from adaattn_hf.errors import UsageError

from .front.page import ROWS, TEXTS, bars, checked, every_arm, gains, of_texts
from .headline_picture import badge, draw
from .headline_tables import kept, peers, rates, real

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
ASSETS = ROOT / "docs" / "assets"
README, FIGURES, COMPARISON = ROOT / "README.md", ROOT / "docs" / "figures.md", ROOT / "docs" / "comparison.md"
MARKS = "<!-- {name}: begin -->", "<!-- {name}: end -->"
REPORTS = ("bench", "gpu", "real_models")
SEARCHES = ("1f23ec14a", "59cad8206")
"""Commits of the searches on text that none had read, whose rates the README has; docs/figures.md has all."""

Reports = Mapping[str, Any]


def supported(pyproject: str) -> list[tuple[str, str]]:
    """What the badges say: versions and licence, as pyproject.toml has them."""
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)
    dependencies = pyproject.partition("\ndependencies = [")[2].partition("]")[0]
    (torch,) = re.findall(r'"torch>=([\d.]+)"', dependencies)
    ((low, high),) = re.findall(r'"transformers>=([\d.]+),<5\.(\d+)"', dependencies)
    (licence,) = re.findall(r'^license = "(.*)"', pyproject, re.MULTILINE)
    versions = ("Python", f"{pythons[0]}–{pythons[-1]}"), ("PyTorch", f"≥ {torch}")
    return [*versions, ("Transformers", f"{low}–5.{int(high) - 1}"), ("licence", licence)]


def badges(named: Sequence[tuple[str, str]]) -> str:
    """The README's line of badges."""
    links = (f"[![{name} {value}](docs/assets/badge_{name.lower()}.svg)](docs/support.md)" for name, value in named)
    return "\n".join(links)


def rewrite(page: str, written: Mapping[str, str]) -> str:
    """The page with each text between the marks of its name; UsageError where it lacks marks."""
    for name, text in written.items():
        first, last = (mark.format(name=name) for mark in MARKS)
        head, begin, rest = page.partition(first)
        _, end, tail = rest.partition(last)
        if not begin or not end:
            raise UsageError(f"got a page without {first} and {last}")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def kept_reports() -> dict[str, Any]:
    """The reports in docs/results by name; of those of the first page what was measured."""
    names = [*REPORTS, *(f"front_{place}" for place in ROWS if (RESULTS / f"front_{place}.json").is_file())]
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def picture(reports: Reports) -> str:
    """The README's picture, in SVG."""
    found = [bar for place, rows in ROWS.items() if f"front_{place}" in reports
             for bar in bars(checked(reports[f"front_{place}"]), rows)]  # fmt: skip
    return draw(found, "Speedup over the fastest of stock")


def written(reports: Reports) -> dict[Path, str]:
    """Every file that holds figures, and what it holds."""
    named = supported((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    front = {"badges": badges(named), "kept": rates(reports["real_models"], SEARCHES)}
    blocks = {"searches": kept(reports["real_models"]), "real": real(reports["real_models"])}
    blocks["texts"] = of_texts(checked(reports.get("front_gpu", {})))
    for place, rows in ROWS.items():
        cells = checked(reports.get(f"front_{place}", {}))
        lacking = "Not measured yet beside all arms of stock; [older figures]({}BENCHMARKS.md).".format
        front[place] = gains(cells, rows) if cells else lacking("")
        others = {name: cell for name, cell in cells.items() if not name.startswith(TEXTS)}
        blocks[place] = every_arm(others) if others else lacking("../")
    return {
        README: rewrite(README.read_text(encoding="utf-8"), front),
        FIGURES: rewrite(FIGURES.read_text(encoding="utf-8"), blocks),
        COMPARISON: rewrite(COMPARISON.read_text(encoding="utf-8"), {"peers": peers(reports)}),
        ASSETS / "speed.svg": picture(reports),
        **{ASSETS / f"badge_{name.lower()}.svg": badge(name, value) for name, value in named},
    }


if __name__ == "__main__":
    for path, text in written(kept_reports()).items():
        write_atomically(path, text.encode())
