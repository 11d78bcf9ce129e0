"""What the README and the other pages name is there: backends, links, files, commits, commands."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from adaattn_hf.backends.select import BACKENDS

from ..support.source_tree import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
REPORTS = sorted((ROOT / "docs").rglob("*.json"))
ROOMS = (
    "adaattn_hf", "adaattn_cli", "patches", "configs", "eval", "tests", "docs", "studies", "hub", "examples",
    "notebooks", "recipe",
)  # fmt: skip
NAMED = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`|`((?!llama\.cpp`)[\w./-]+\.(?:py|hpp|cpp|yaml))`")
COMMIT = re.compile(r"(?<![\w./#-])((?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,12}|[0-9a-f]{40})(?:\+dirty)?(?![\w-])")
"""Seven digits and letters or more, as git shortens them, or all forty."""


def test_every_backend_is_in_the_table() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    table = page.partition("## Which backend?")[2].partition("\n```")[0]
    named = {name for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(BACKENDS) | {"native"}


def test_the_readme_is_one_screen_after_another_in_this_order() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    wanted = ["Who gains", "Install", "Use", "A loss budget", "What differs from stock", "Documentation"]
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == wanted


def dead_links(document: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [t for t in targets if t and "://" not in t and not (document.parent / t).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert dead_links(document) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("[here](b.md) [there](https://example.org) [self](a.md#top)\n```\n[x](c.md)\n```\n")
    assert dead_links(document) == ["b.md"]


def dead_paths(text: str, holds: Callable[[str, str], bool]) -> list[str]:
    """Files and directories of the checkout that a text names and that neither exist nor did at a commit beside them.

    Args:
        text: Of a document. Source files may be named by the end of their path.
        holds: Whether a commit has a file.
    """
    named = [match[0] or match[1] for match in NAMED.findall(text)]
    lost = [name for name in named if not (ROOT / name).exists() and not any(p.endswith(f"/{name}") for p in tree())]
    return [
        name for name in lost if not any(holds(digits, name) for digits in re.findall(r"commit (\w{7,40})\b", text))
    ]


@cache
def tree() -> frozenset[str]:
    return frozenset(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.*"))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def history() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: a source archive has no history")
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("a shallow clone has no history")
    return git("log", "--format=%H").stdout.split()


def held(commit: str, path: str) -> bool:
    return git("cat-file", "-e", f"{commit}:{path}").returncode == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path, history: list[str]) -> None:
    assert dead_paths(document.read_text(encoding="utf-8"), held) == []


def test_a_dead_path_is_found(history: list[str]) -> None:
    there = "`adaattn_hf/attention/structure.py`, `structure.py` and a user's `config.json`, in `patches/`\n"
    gone = "`adaattn_hf/engine_manager.py` of `studies/budget/ablate.py`"
    assert dead_paths(there, held) == []
    assert dead_paths(gone, held) == ["adaattn_hf/engine_manager.py", "studies/budget/ablate.py"]
    assert dead_paths(f"{gone}, in git at commit 0354931.", held) == ["adaattn_hf/engine_manager.py"]


def commits_in(document: Path) -> Iterator[str]:
    text = document.read_text(encoding="utf-8")
    if document.suffix != ".json":
        yield from COMMIT.findall(text)
        return
    rooms = [json.loads(text)]
    while rooms:
        room = rooms.pop()
        if isinstance(room, dict) and isinstance(room.get("commit"), str):
            yield room["commit"].removesuffix("+dirty")
        rooms.extend(room.values() if isinstance(room, dict) else room if isinstance(room, list) else ())


def lost_commits(document: Path, history: list[str]) -> set[str]:
    return {one for one in commits_in(document) if not any(full.startswith(one) for full in history)}


@pytest.mark.parametrize("document", [*DOCUMENTS, *REPORTS], ids=lambda path: path.name)
def test_named_commits_exist(document: Path, history: list[str]) -> None:
    assert lost_commits(document, history) == set()


def test_a_lost_commit_is_found(tmp_path: Path, history: list[str]) -> None:
    page, report = tmp_path / "a.md", tmp_path / "a.json"
    lost = "30d1d7b935b943487cca56cec0dcb92c3d704d5a"
    page.write_text(
        f"at commit {history[-1][:9]}, measured at {lost}+dirty; a key of 0123456789abcdef0 and 100000000 tokens\n"
    )
    report.write_text(json.dumps({"cells": [{"commit": None}, {"commit": history[0]}, {"commit": f"{lost}+dirty"}]}))
    assert lost_commits(page, history) == lost_commits(report, history) == {lost}
