"""What the README and the other pages name is there: backends, links, files, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.cli.main import COMMANDS, load_command

from ..support.source_tree import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_every_backend_is_in_the_table() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    table = page.partition("## Which backend?")[2].partition("\n```")[0]
    named = {name for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(BACKENDS) | {"native"}


def test_the_readme_is_one_screen_after_another_in_this_order() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    wanted = [
        "Install",
        "Use",
        "Who gains",
        "A loss budget",
        "How much",
        "What differs from stock",
        "Read on",
    ]
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == wanted


def dead_links(document: Path) -> list[str]:
    """Links of a document to files that are not there."""
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


def dead_paths(document: Path) -> list[str]:
    """Files and directories of the package that a document names and that do not exist."""
    named = re.findall(
        r"`((?:adaattn_hf|patches|configs|eval|tests|docs)/[\w./]*)`", document.read_text(encoding="utf-8")
    )
    return [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    assert dead_paths(document) == []


def test_a_dead_path_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("`adaattn_hf/attention/structure.py` and `adaattn_hf/engine_manager.py`, in `patches/`\n")
    assert dead_paths(document) == ["adaattn_hf/engine_manager.py"]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_can_be_read(name: str) -> None:
    """Its module is there, and typer understands its arguments."""
    command = load_command(name)
    assert command.name == name
    assert (command.help or "").strip()
