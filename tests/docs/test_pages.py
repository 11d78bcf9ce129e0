"""Every page's code is run: Python from top to bottom, marked shell blocks; commands as far as their options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adaattn_hf.cli.main import COMMANDS, load_command

from ..support.pages import PAGES, Block, blocks, command_lines, lacking
from ..support.source_tree import ROOT
from ..support.warm import WarmInterpreter


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]


WITH_PYTHON = [page for page in PAGES if any(not block.needs for block in python_blocks(page))]
MARKED = [(page, number) for page in PAGES for number, block in enumerate(python_blocks(page)) if block.needs]
WITH_RUN = [page for page in PAGES if any(block.run for block in blocks(page.read_text(encoding="utf-8")))]


def unprinted(text: str, printed: str) -> list[str]:
    """Blocks of outputs in a page that its programs did not print."""
    return [block.code for block in blocks(text) if block.language == "output" and block.code not in printed]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, interpreter: WarmInterpreter) -> None:
    code = "\n".join(block.code for block in python_blocks(page) if not block.needs)
    done = interpreter.run(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert unprinted(page.read_text(encoding="utf-8"), done.stdout) == []


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), MARKED, ids=[f"{named(p)}-{n}" for p, n in MARKED])
def test_python_that_needs_something_runs_where_it_is(
    page: Path, number: int, tmp_path: Path, interpreter: WarmInterpreter
) -> None:
    """With the blocks above it that need nothing."""
    found = python_blocks(page)
    if missing := lacking(found[number].needs):
        pytest.skip(missing)
    before = [block.code for block in found[:number] if not block.needs]
    done = interpreter.run("\n".join([*before, found[number].code]), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_RUN, ids=named)
def test_shell_blocks_that_are_marked_run(page: Path, tmp_path: Path) -> None:
    script = "\n".join(block.code for block in blocks(page.read_text(encoding="utf-8")) if block.run)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def unknown_options(words: list[str]) -> list[str]:
    """What is wrong with a command line of `adaattn`, as far as its names."""
    known, rest = {"--version", "--help", "--install-completion"}, words[1:]
    if rest and not rest[0].startswith("-"):
        if rest[0] not in COMMANDS:
            return [f"there is no command {rest[0]}"]
        command, rest = load_command(rest[0]), rest[1:]
        if children := getattr(command, "commands", None):
            if not rest or rest[0] not in children:
                return [f"{command.name} has no command {' '.join(rest[:1])}"]
            command, rest = children[rest[0]], rest[1:]
        known = {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    if "--" in rest:
        rest = rest[: rest.index("--")]
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_have_the_options_that_a_page_names(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [bad for words in command_lines(text, "adaattn") for bad in unknown_options(words)] == []


def test_an_option_that_is_not_there_is_found() -> None:
    assert unknown_options(["adaattn", "eval", "MODEL", "--datta", "x"]) == ["--datta"]
    assert unknown_options(["adaattn", "plan", "paint", "x"]) == ["plan has no command paint"]
    assert unknown_options(["adaattn", "mend"]) == ["there is no command mend"]
    assert unknown_options(["adaattn", "explain", "MODEL", "--dtype=bfloat16"]) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_make_has_the_targets_that_a_page_names(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = command_lines(page.read_text(encoding="utf-8"), "make")
    assert {word for words in lines for word in words[1:] if "=" not in word} <= targets


def test_blocks_are_found_with_their_marks() -> None:
    page = (
        "```python\na = 1\n```\n<!-- needs: cuda -->\n```python\nb = 2\n```\n"
        "=== tab\n\n    <!-- run -->\n    ```bash\n    adaattn --version\n    ```\n"
    )
    first, second, third = blocks(page)
    assert (first.code, first.needs) == ("a = 1\n", "")
    assert (second.code, second.needs) == ("b = 2\n", "cuda")
    assert (third.language, third.code, third.run) == ("bash", "adaattn --version\n", True)
    assert command_lines("```bash\nA=1 adaattn eval \\\n  M  # note\n```\n", "adaattn") == [["adaattn", "eval", "M"]]


def test_an_output_that_is_not_printed_is_found() -> None:
    page = "```output\n1\n2\n```\n"
    assert (unprinted(page, "0\n1\n2\n3\n"), unprinted(page, "1\n3\n")) == ([], ["1\n2\n"])


def test_a_need_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="cudda"):
        lacking("cudda")


def test_a_block_that_fails_is_noticed(tmp_path: Path, interpreter: WarmInterpreter) -> None:
    done = interpreter.run("import adaattn_hf\nprint('here')\nadaattn_hf.repair()", tmp_path)
    assert (done.returncode, done.stdout) == (1, "here\n")
    assert "has no attribute 'repair'" in done.stderr


def test_no_program_sees_what_another_one_did(tmp_path: Path, interpreter: WarmInterpreter) -> None:
    interpreter.run("import adaattn_hf, os, torch; torch.set_grad_enabled(False); here = 1", tmp_path)
    code = "import sys, torch; print('adaattn_hf' in sys.modules, torch.is_grad_enabled(), 'here' in globals())"
    assert interpreter.run(code, tmp_path).stdout == "False True False\n"
    assert interpreter.run("import os; os.kill(os.getpid(), 9)", tmp_path).returncode == -9


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_mark_of_a_page_is_known_and_stands_above_a_block(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = blocks(text)
    for block in found:
        lacking(block.needs)
    assert len(re.findall(r"<!-- (?:needs: |run -->)", text)) == sum(bool(b.needs or b.run) for b in found)


def test_every_command_has_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {name for name in COMMANDS if f"adaattn {name}" not in text} == set()
