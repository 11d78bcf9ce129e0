"""Options from the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import typer
from typer.testing import CliRunner

from adaattn_hf.cli.fields import says, with_options


@dataclass(frozen=True)
class Wanted:
    where: Path | None = field(default=None, metadata=says("Where it goes."))
    how_many: int = field(default=3, metadata=says("How many."))
    loud: bool = field(default=False, metadata=says("Loudly."))


app = typer.Typer(add_completion=False)


@app.command()
@with_options(wanted=Wanted)
def command(name: str, *, wanted: Wanted) -> None:
    """Print what was asked for."""
    typer.echo(f"{name} {wanted}")


def test_fields_are_options_with_their_defaults() -> None:
    assert CliRunner().invoke(app, ["a"]).output == f"a {Wanted()}\n"
    done = CliRunner().invoke(app, ["a", "--where", "here", "--how-many", "5", "--loud"])
    assert done.output == f"a {Wanted(Path('here'), 5, True)}\n"
    assert CliRunner().invoke(app, ["a", "--how-many", "few"]).exit_code == 2
    assert CliRunner().invoke(app, ["a", "--no-loud"]).exit_code == 2


def test_their_help_is_that_of_the_fields() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(words in shown for words in ("Where it goes.", "How many.", "Loudly.", "[default: 3]"))
