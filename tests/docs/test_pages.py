"""Every page's code is run: Python from top to bottom, marked shell blocks; commands as far as their options."""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaattn_cli.app import app
from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages

from ..support.pages import PAGES, Block, blocks, command_lines, heard, lacking, why_none
from ..support.source_tree import ROOT
from ..support.warm import CALLER, SERVING, WarmInterpreter


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]


COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WITH_PYTHON = [page for page in PAGES if any(not block.needs for block in python_blocks(page))]
MARKED = [(page, number) for page in PAGES for number, block in enumerate(python_blocks(page)) if block.needs]
HOUR, BUDGETS = ROOT / "docs" / "first_hour.md", ROOT / "docs" / "guides" / "budgets.md"
FIRST = {ROOT / "README.md", ROOT / "docs" / "quickstart.md", HOUR, *BUDGETS.parent.glob("*.md")}
"""Pages whose shell blocks are all run, not only those that are marked."""
RUN = [page for page in PAGES if page in FIRST or any(b.run for b in blocks(page.read_text(encoding="utf-8")))]
PLACEHOLDERS = {
    r" --gguf-file \S+": "", r"\bMODEL\b|SmolLM2-135M-Instruct-gguf": "half", "alice.txt": "book.txt",
    r"\b0\.1%": "30%", r"(?<![.\d])1%": "60%",
}  # fmt: skip
"""What a reader puts in; so little text as here proves no smaller budget."""
SMALL = {
    "calibrate": "--lengths 256 --sequences 2 --held-out 6 --joint 1 --labels 1 --quiet",
    "eval": "--limit-docs 1 --limit-tokens 200",
}
"""Options behind what a page types, so that it takes seconds."""
TYPED = re.compile(r"\$ (?P<command>(?:.*\\\n)*.*\n)")
"""The command at the head of a transcript. It is run, too, and writes to `transcript-NUMBER`."""
PRELUDE = """
PATH="BIN:$PATH"
for program in pip make docker accelerate torchrun; do eval "$program() { :; }"; done
adaattn() {
  case "$*" in
    run* | bench*) return ;;  # other programs, and minutes
    calibrate*) set -- "$@" CALIBRATE ;;
    eval) set -- eval EVAL --dtype float32 ;;  # so little text decides nothing in bfloat16
    eval*) set -- "$@" EVAL ;;
  esac
  PYTHON -IS -c 'CALLER' SOCKET "$@" || case "$1 $?" in  # whether a plan is worth it is the machine's to say
    "calibrate 4" | "verify 1") ;;
    *) return 1 ;;
  esac
}
"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what pages take for granted: a checkpoint in half precision, and texts."""
    place = tmp_path_factory.mktemp("shelf")
    name = demo_model_path("llama")
    AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).save_pretrained(place / "half")
    AutoTokenizer.from_pretrained(name).save_pretrained(place / "half")
    (place / "books").mkdir()
    for number, pages in enumerate((calibration_pages(), heldout_pages(), calibration_pages()[::-1])):
        text = "\n".join(page[number:] for page in pages)  # no two of them are the same text
        names = ("books/one.txt",) if number == 0 else (("news.txt", "book.txt"), ("other.txt", "mine.txt"))[number - 1]
        for each in names:
            (place / each).write_text(text, encoding="utf-8")
    return place


def pasted(page: Path, socket: str) -> str:
    """The blocks of a page as one program: Python as it is, shell blocks by bash where they stand.

    Commands run in copies of its process, and import neither torch nor Transformers again.
    """
    lines = ["import subprocess, sys", SERVING, f"serve({socket!r})"]
    prelude = PRELUDE.replace("BIN", str(Path(sys.executable).parent)).replace("PYTHON", sys.executable)
    prelude = prelude.replace("CALIBRATE", SMALL["calibrate"]).replace("EVAL", SMALL["eval"])
    prelude = prelude.replace("CALLER", CALLER).replace("SOCKET", socket)
    for number, block in enumerate(blocks(page.read_text(encoding="utf-8"))):
        code = block.code
        if page in FIRST and block.language == "text" and (typed := TYPED.match(code)):
            code = f"exec > transcript-{number} 2>&1\n{typed['command']}"
            lines.append(f"subprocess.run(['bash', '-eu', '-c', {prelude + code!r}], check=True)")
        elif block.language == "python" and not block.needs:
            lines.append(code)
        elif block.language == "bash" and (block.run or page in FIRST):
            for placeholder, value in PLACEHOLDERS.items() if page in FIRST else ():
                code = re.sub(placeholder, value, code)
            lines.append("sys.stdout.flush()")
            # a first hour shows refusals as well
            lines.append(f"subprocess.run(['bash', '-eu', '-c', {prelude + code!r}], check={page != HOUR})")
    return "\n".join(lines)


def unprinted(text: str, printed: str) -> list[str]:
    """Blocks of outputs in a page that its programs did not print."""
    return [block.code for block in blocks(text) if block.language == "output" and block.code not in printed]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page in {*WITH_PYTHON, *RUN}], ids=named)
def test_a_page_runs_from_top_to_bottom(
    page: Path, shelf: Path, tmp_path: Path, interpreter: WarmInterpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in shelf.iterdir():
        (tmp_path / name.name).symlink_to(name)
    with TemporaryDirectory() as short:  # pytest's own directories are too deep for a socket
        done = interpreter.run(pasted(page, f"{short}/adaattn"), tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    text = page.read_text(encoding="utf-8")
    assert unprinted(text, done.stdout) == []
    for number, block in enumerate(blocks(text)):
        if block.language == "text" and page in (HOUR, BUDGETS) and "SmolLM2" not in block.code:
            shown, own = " ".join(TYPED.sub("", block.code).split()), tmp_path / f"transcript-{number}"
            printed = own.read_text(encoding="utf-8") if own.exists() else done.stdout + done.stderr
            # what a calibration finds is the machine's to say
            other = why_none(shown) != why_none(printed)
            if not (other and ("allowed" in shown or own.exists())):
                assert heard(shown, printed) >= 0.8, shown


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


def unknown_options(words: list[str]) -> list[str]:
    """What is wrong with a command line of `adaattn`, as far as its names."""
    known, rest = {"--version", "--help", "--install-completion"}, words[1:]
    if rest and not rest[0].startswith("-"):
        if rest[0] not in COMMANDS:
            return [f"there is no command {rest[0]}"]
        command, rest = COMMANDS[rest[0]], rest[1:]
        if children := getattr(command, "commands", None):
            if not rest or rest[0] not in children:
                return [f"{command.name} has no command {' '.join(rest[:1])}"]
            command, rest = children[rest[0]], rest[1:]
        known = {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        if command.name == "run":  # what follows the program is the program's
            rest = rest[: 2 * (rest[0] == "--plan")]
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
    assert (heard("took 2 s: all kept", "12:00 took 3 s: all is kept"), heard("all kept", "lost")) == (1.0, 0.0)
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
