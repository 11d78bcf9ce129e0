"""The README is run: its Python from top to bottom, its commands as far as their options, its links as far as files."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.cli import COMMANDS, app

from ..support.source_tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(language: str, text: str = README) -> list[str]:
    """Fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_python_blocks_run_from_top_to_bottom(tmp_path: Path) -> None:
    """In one process, as a reader would paste them."""
    code = blocks("python")
    assert len(code) >= 3
    done = subprocess.run(
        [sys.executable, "-P", "-c", "\n".join(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "attn_implementation='adaattn'" in done.stdout
    assert "train_loss" in done.stdout


def commands(program: str) -> list[list[str]]:
    """Command lines of a program in the README's shell blocks, without comments."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] == program]


def test_commands_have_the_options_that_the_readme_names() -> None:
    group: Any = typer.main.get_command(app)
    found = commands("adaattn")
    assert len(found) >= 4
    for _, name, *words in found:
        assert name in COMMANDS
        options = {option for parameter in group.get_command(None, name).params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, words


def test_make_has_the_targets_that_the_readme_names() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for words in commands("make") for target in words[1:]}
    assert named >= {"demo", "test"}
    assert named <= targets


def test_every_backend_is_in_the_table() -> None:
    table = README.partition("## Backends")[2].partition("\n## ")[0]
    named = {
        name
        for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == set(BACKENDS) | {"native"}


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
    document.write_text("`adaattn_hf/structure.py` and `adaattn_hf/engine_manager.py`, in `patches/`\n")
    assert dead_paths(document) == ["adaattn_hf/engine_manager.py"]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_can_be_read(name: str) -> None:
    """Its module is there, and typer understands its arguments."""
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, name)
    assert command.name == name
    assert (command.help or "").strip()
