"""Runs `adaattn` in this process, and holds its exit code and what it says against what is expected."""

from typing import Any

import typer
from typer.testing import CliRunner, Result

from adaattn_cli.app import app
from adaattn_cli.commands import COMMANDS

TOLD_ASIDE = (2, 3, 6)
"""Exit codes whose reason is told on stderr: of mistakes, files and memory."""


def adaattn(
    *words: object, code: int | tuple[int, ...] = 0, says: str | tuple[str, ...] = (), width: int | None = 200
) -> Result:
    """The result of a command, which must end with the exit code, or one of several, and say all of `says`."""
    done = CliRunner().invoke(app, [str(word) for word in words], terminal_width=width)
    assert done.exit_code in (code if isinstance(code, tuple) else (code,)), (done.output, done.exception)
    assert "Traceback" not in done.output
    said = done.stderr if done.exit_code in TOLD_ASIDE else done.output
    said += " ".join(said.split())  # sentences that were broken into lines
    assert [one for one in ((says,) if isinstance(says, str) else says) if one not in said] == [], said
    return done


def leaves() -> dict[str, Any]:
    """Every command as typer shows it, by what is typed."""
    found: dict[str, Any] = {}
    for name in COMMANDS:
        found[name] = typer.main.get_command(app)
        for word in name.split():
            found[name] = found[name].commands[word]
    return found


def options_of(command: Any) -> set[str]:
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
