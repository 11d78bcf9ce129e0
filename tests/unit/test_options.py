"""Options that typer reads; and those of the commands, which say what the package says."""

import dataclasses
import importlib
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from adaattn_cli import app as application
from adaattn_cli.commands import (
    AIMS,
    CACHES,
    CALIBRATE,
    COMMANDS,
    DTYPES,
    EVAL,
    OBJECTIVES,
    PADDINGS,
    RECIPES,
)  # fmt: skip
from adaattn_cli.options import FAMILIES, Command, Done, Option, Options, argument, words
from adaattn_hf.attention.stored import CACHE_FORMATS
from adaattn_hf.calibration import settings as calibration
from adaattn_hf.eval import settings as evaluation
from adaattn_hf.eval.objectives import MaskedTokens
from adaattn_hf.patches import checkpoint
from adaattn_hf.policy.candidates import known_families


def _doubled(text: str, name: str) -> float:
    try:
        return 2 * float(text)
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, expected a number") from error


def _refuse_13(options: Options) -> None:
    if options.how_many == 13:
        raise ValueError("how_many: got 13, expected another number")


LAST = {"where": Option(Path, None, "Where it goes.")}
WANTED = Command(
    "Print what was asked for.",
    {},
    _refuse_13,
    name=argument(str, ..., "Whose."),
    how_many=Option(int, 3, "How many.", least=1),
    loud=Option(bool, False, "Loudly."),
    times=Option(float, 2.0, "How often: a number.", "--how-often", read=_doubled),
    kind=Option(str, None, "What kind.", choices=("a", "b8")),
    named=Option(list[str], (), "Names."),
    **LAST,
)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    def run(options: Options) -> Done:
        typer.echo(options)
        return Done(code=3)

    monkeypatch.setitem(sys.modules, "adaattn_cli.wanted", SimpleNamespace(run=run))
    made = application.group(add_completion=False)
    for name in ("wanted", "other"):
        application.add(made, name, WANTED)
    return made


def test_options_are_typed_or_have_their_defaults(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["wanted", "a"]).output == f"{WANTED(name='a')}\n"
    typed = "wanted a --where=~/here --how-many 5 --loud --how-often 4 --kind b8 --named x --named y"
    done = CliRunner().invoke(app, typed)
    every = WANTED(name="a", where=Path.home() / "here", how_many=5, loud=True, times=8.0, kind="b8", named=("x", "y"))
    assert done.output == f"{every}\n"
    assert done.exit_code == 3


def test_an_option_that_a_command_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="options: got hwo_many, expected some of name, how_many"):
        WANTED(hwo_many=5)


@pytest.mark.parametrize(("typed", "says"), [
    (["--how-many", "few"], "Invalid value"), (["--how-many", "0"], "Invalid value"),
    (["--no-loud"], "No such option"), (["--kind", "c"], "Invalid value"),
    (["--where", ""], "error: where is '', expected a path"),
    (["--how-often", "x"], "error: how_often is 'x', expected a number"),
    (["--how-many", "13"], "error: how_many: got 13, expected another number"),
])  # fmt: skip
def test_mistakes_are_sentences_with_exit_code_2(typed: list[str], says: str, app: typer.Typer) -> None:
    done = CliRunner().invoke(app, ["wanted", "a", *typed])
    assert (done.exit_code, says in done.output) == (2, True), done.output


def test_a_help_page_says_what_each_takes(app: typer.Typer) -> None:
    shown = " ".join(CliRunner().invoke(app, ["wanted", "--help"], terminal_width=200).output.split())
    helps = (
        "Where it goes.", "How many.", "Loudly.", "How often: a number.", "What kind. One of a, b8.",
        "[default: 3]",
    )  # fmt: skip
    assert all(words in shown for words in helps)
    assert shown.index("How many.") < shown.index("Where it goes"), "in the order in which they are named"


def test_words_are_split_at_commas_and_none_is_refused() -> None:
    assert words(" window, bf16,", "families") == ("window", "bf16")
    with pytest.raises(ValueError, match=r"families is ' ,', expected some of"):
        words(" ,", "families")


SETTINGS: list[tuple[Command, Any]] = [
    (EVAL, evaluation.Settings), (CALIBRATE, calibration.CalibrationSettings),
]  # fmt: skip
BOUND_LAYERS = {"haystacks", "needles", "windows", "alpha", "rounds"}
"""Settings of a calibration that are no options."""


def differing(command: Command, settings: Any) -> list[str]:
    """Settings that are no options, or whose default is not said by the option of that name."""
    said = {name: one.default for name, one in command.options.items()}
    return [
        one.name
        for one in dataclasses.fields(settings)
        if one.name not in BOUND_LAYERS and said.get(one.name, "absent") not in (None, (), one.default)
    ]


@pytest.mark.parametrize(("command", "settings"), SETTINGS)
def test_a_setting_is_an_option_with_the_same_default(command: Command, settings: Any) -> None:
    assert differing(command, settings) == []
    if command is not EVAL:
        readings = tuple(command.options[name].default for name in ("mask_share", "maskings"))
        assert readings == (MaskedTokens.share, MaskedTokens.count)


def test_another_default_or_a_missing_option_would_show() -> None:
    other = dataclasses.make_dataclass("Other", [("seed", int, 1), ("absent", int, 0), ("plan", str | None, None)])
    assert differing(EVAL, other) == ["seed", "absent"]


def test_the_words_of_options_are_those_that_the_package_knows() -> None:
    assert CACHE_FORMATS == CACHES
    assert set(FAMILIES) == set(known_families())
    assert set(DTYPES) == {*checkpoint.DTYPES, "auto"}
    assert (PADDINGS, RECIPES, AIMS) == (evaluation.PADDINGS, evaluation.RECIPES, calibration.AIMS)
    assert ("auto", *get_args(checkpoint.Objective)) == OBJECTIVES


def test_every_command_is_done_by_a_function() -> None:
    for name in COMMANDS:
        module, _, function = name.partition(" ")
        work = getattr(importlib.import_module(f"adaattn_cli.{module}"), function or "run")
        assert next(iter(inspect.signature(work, eval_str=True).parameters.values())).annotation is Options, name
