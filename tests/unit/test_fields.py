"""Options from the fields of a dataclass, and those of the commands: each is said once, in its docstring."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from adaattn_hf.attention.stored import FORMATS
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.cli import fields, main
from adaattn_hf.cli.bench import Bench
from adaattn_hf.cli.calibrate import Asked
from adaattn_hf.cli.fields import declared, described, with_options
from adaattn_hf.cli.place import Place
from adaattn_hf.eval.settings import Limits, Loading, Masking, Output, Settings, Text
from adaattn_hf.patches.checkpoint import DTYPES
from adaattn_hf.policy.candidates import FAMILIES, known_families

from ..support.command import leaves


def _doubled(text: str, argument: str) -> float:
    try:
        return 2 * float(text)
    except ValueError as error:
        raise ValueError(f"{argument} is {text!r}, expected a number") from error


@dataclass(frozen=True)
class Base:
    """What comes first.

    Attributes:
        where: Where it goes, by default
            nowhere.
    """

    where: Path | None = None


@dataclass(frozen=True)
class Wanted(Base):
    """What is wanted.

    Attributes:
        how_many: How many.
        loud: Loudly.
        times: How often: a number.
        kind: What kind.
        named: Names, some of `families`.
        inner: Of programs alone.

    No field: of another paragraph.
    """

    how_many: int = field(default=3, metadata={"least": 1})
    loud: bool = False
    times: float = field(default=2.0, metadata={"option": "--how-often", "read": _doubled})
    kind: str | None = field(default=None, metadata={"choices": ("a",), "names": ("attention/stored.py", "FORMATS")})
    named: tuple[str, ...] = field(
        default_factory=lambda: ("all",), metadata={"names": ("plans/choices/*.py", "families")}
    )
    inner: int = field(default=7, metadata={"option": None})

    def __post_init__(self) -> None:
        if self.how_many == 13:
            raise ValueError("how_many: got 13, expected another number")


app = typer.Typer(add_completion=False)


@app.command()
@with_options(wanted=Wanted)
def command(name: str, *, wanted: Wanted) -> None:
    """Print what was asked for."""
    typer.echo(f"{name} {wanted}")


def test_fields_are_options_with_their_defaults() -> None:
    assert CliRunner().invoke(app, ["a"]).output == f"a {Wanted()}\n"
    words = "a --where here --how-many 5 --loud --how-often 4 --kind k8v4 --named x --named y"
    done = CliRunner().invoke(app, words)
    assert done.output == f"a {Wanted(Path('here'), 5, True, 8.0, 'k8v4', ('x', 'y'))}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--how-many", "few"], "Invalid value"),
        (["--how-many", "0"], "Invalid value"),
        (["--no-loud"], "No such option"),
        (["--inner", "1"], "No such option"),
        (["--kind", "b"], "Invalid value"),
        (["--how-often", "x"], "error: how_often is 'x', expected a number"),
        (["--how-many", "13"], "error: how_many: got 13, expected another number"),
    ],
)
def test_mistakes_are_sentences_with_exit_code_2(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["a", *words])
    assert (done.exit_code, says in done.output) == (2, True), done.output


def test_their_help_is_that_of_the_docstring() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=200).output.split())
    helps = (
        "Where it goes, by default nowhere.",
        "How many.",
        "Loudly.",
        "How often: a number.",
        "What kind. One of a, int8, k8v4.",
        "[default: 3]",
    )
    assert all(words in shown for words in helps)
    assert all(name in shown for name in known_families())
    assert shown.index("How many.") < shown.index("Where it goes"), "those of a base come last"
    assert set(described(Wanted)) == {one.name for one in dataclasses.fields(Wanted)}


GROUPS = (Asked, Bench, CalibrationSettings, Limits, Loading, Masking, Output, Place, Settings, Text)


@pytest.mark.parametrize("group", GROUPS)
def test_every_field_of_a_commands_options_is_described(group: Any) -> None:
    assert set(described(group)) == {one.name for one in dataclasses.fields(group)}


def test_every_option_has_a_help() -> None:
    lacking = {name: [p.name for p in one.params if p.name != "help" and not p.help] for name, one in leaves().items()}
    assert not any(lacking.values()), lacking


def test_names_in_a_help_are_those_that_the_code_knows() -> None:
    """They are read from the source, as help waits for no import; a new one is there by itself."""
    assert set(declared("plans/choices/*.py", "families")) == set(known_families()) == set(FAMILIES)
    assert declared("attention/stored.py", "FORMATS") == FORMATS
    helps = {(name, one.name): one.help for name in main.COMMANDS for one in main.load_command(name).params}
    for command, option, names in (
        ("calibrate", "families", known_families()),
        ("eval", "cache", ["model", *FORMATS]),
        ("explain", "cache", ["model", *FORMATS]),
        *((one, "dtype", [*DTYPES, "auto"]) for one in ("eval", "profile", "calibrate", "explain")),
    ):
        assert [name for name in names if name not in helps[command, option]] == [], (command, option)


def test_a_new_name_appears_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text('_ALL = ("x", "y")\n\n\nclass One:\n    families = _ALL\n')
    (tmp_path / "two.py").write_text('class Two:\n    families = ("z",)\n    other = f()\n')
    (tmp_path / "no.py").write_text("")
    monkeypatch.setattr(fields, "__file__", str(tmp_path / "cli" / "fields.py"))
    assert declared("*.py", "families") == ("x", "y", "z")
