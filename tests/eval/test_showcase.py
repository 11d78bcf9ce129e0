"""`adaattn eval` without a model: the models in the package, on a little of the text in the package."""

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from adaattn_hf.eval import progress, runner, showcase
from adaattn_hf.eval.demo import DEMO_MODELS

from ..support.command import adaattn

LITTLE = ("--limit-docs", "2", "--limit-tokens", "200")


def test_the_models_in_the_package(tmp_path: Path) -> None:
    # so little text decides nothing in bfloat16: a missed bar there is no failure of this test
    result = adaattn("eval", *LITTLE, "--output-dir", tmp_path, code=(0, 1))
    reports = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.rglob(runner.REPORT)}
    cells = itertools.product(DEMO_MODELS, showcase.DTYPES, ("pages", "last-word"))
    assert set(reports) == set(map("-".join, cells))
    for name, report in reports.items():
        assert report["model"]["dtype"] in name
        assert [arm["implementation"] for arm in report["quality"]["arms"]] == ["sdpa", "adaattn", "eager"]
        assert report["quality"]["arms"][0]["perplexity"] < 500  # they are trained
        assert name.split("-")[0] in result.output
        if report["model"]["dtype"] == "float32":
            assert showcase.verdict(report) == (True, showcase.verdict(report)[1])
    assert result.stdout.count(" yes ") >= 6
    assert max(map(len, result.stdout.splitlines()[:18])) <= 80
    assert result.stderr.count(": done after ") == len(reports)  # no terminal: a line for each that is done


def test_without_a_terminal_lines_tell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every ten seconds; every few milliseconds here."""
    assert progress.EVERY <= 10.0
    monkeypatch.setattr(progress, "EVERY", 0.005)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.0))  # a busy machine may take seconds
    console = Console(stderr=True)
    with progress.shown_progress(console) as tell:
        tell("a model", 2000, 5000)
        said, limit = "", time.monotonic() + 20.0
        while said.count("a model: 40 % after 0 s") < 2 and time.monotonic() < limit:
            time.sleep(0.005)
            shown = capsys.readouterr()
            said += shown.err
            assert shown.out == ""
        monkeypatch.setattr(progress, "EVERY", 60.0)
        tell("a model", 5000, 5000)
    assert said.count("a model: 40 % after 0 s") >= 2
    assert "a model: done after 0 s" in capsys.readouterr().err
    with progress.shown_progress(console, quiet=True) as tell:
        tell("a model", 5000, 5000)
    assert capsys.readouterr().err == ""


def test_a_name_sends_no_control_sequence_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    name = "evil\x1b]0;owned\x07\x9b31m [red]x"
    with progress.shown_progress(Console(stderr=True)) as tell:
        tell(name, 3, 3)
    written = capsys.readouterr().err
    assert "evil" in written
    assert "[red]x" in written
    assert not set(written) & {"\x1b", "\x07", "\x9b"}


def test_another_arm_and_one_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showcase, "DEMO_MODELS", ("gpt2",))
    chosen = ("--attn-implementation", "adaattn_eager", "--dtype", "float32", "--quiet", "--output-dir", str(tmp_path))
    adaattn("eval", *LITTLE, *chosen)
    names = [path.parent.name for path in tmp_path.rglob(runner.REPORT)]
    assert ["float32" in name for name in names] == [True] * 2


def test_a_missed_bar_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showcase, "MAX_RELATIVE_CHANGE", -1.0)
    monkeypatch.setattr(showcase, "DEMO_MODELS", ("gpt2",))
    says = "demo gpt2 float32 on pages: relative change of perplexity"
    adaattn("eval", *LITTLE, "--dtype", "float32", "--output-dir", tmp_path, code=1, says=says)


@pytest.mark.parametrize("option", [
    "--data x.txt", "--tokenizer x", "--max-ppl-ratio 1", "--objective masked", "--split validation",
    "--trust-remote-code",
])  # fmt: skip
def test_arguments_that_need_a_model(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showcase, "DEMO_MODELS", ())
    says = (f"{option.split()[0].removeprefix('--').replace('-', '_')}: got", "without MODEL")
    adaattn("eval", *option.split(), "--quiet", "--output-dir", tmp_path, code=2, says=says)
