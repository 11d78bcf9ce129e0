"""`--json`: every command that prints has it, standard output is JSON and nothing else."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from adaattn_cli.app import app
from adaattn_hf.eval.demo import demo_model_path, pages_path

from ..support.command import leaves, options_of

MODEL, TEXT = str(demo_model_path("llama")), str(pages_path("calibration"))
FEW = "--sequences 2 --held-out 4 --families window,bf16 --device cpu"
CALIBRATED = f"{FEW} --lengths 128 --rows 32 --labels 1 --joint 2"
RUNS = {
    "eval": f"{MODEL} --data {TEXT} --limit-tokens 128 --context 64 --device cpu --output-dir out",
    "profile": f"{MODEL} --data {TEXT} --length 64 --sequences 1 --device cpu",
    "explain": f"{MODEL} --device cpu",
    "calibrate": f"{MODEL} --data {TEXT} --budget 5% --output-dir plan {CALIBRATED}",
    "verify": f"{MODEL} --plan plan --data {TEXT} --device cpu", "plan show": "plan",
    "plan explore": "plan --html page.html",
    "bench": "--only ^tiny.causal --rounds 1 --no-memory --baseline sdpa", "doctor": "",
}  # fmt: skip
"""Words behind each command, those of `plan` and `verify` after the calibration that makes one."""
PROGRAMS_OWN = {"run"}
"""Commands whose output is that of another program."""


def test_every_command_that_prints_has_the_option_and_a_run_here() -> None:
    options = {name: options_of(one) for name, one in leaves().items()}
    assert set(options) == set(RUNS) | PROGRAMS_OWN, "a new command: give it --json and a line in RUNS"
    assert [name for name in RUNS if "--json" not in options[name]] == []


def run(name: str) -> Result:
    return CliRunner().invoke(app, [*name.split(), *RUNS[name].split(), "--json"])


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    directory = tmp_path_factory.mktemp("json")
    with pytest.MonkeyPatch.context() as inside:
        inside.chdir(directory)
        return directory, run("calibrate")


@pytest.mark.parametrize("name", RUNS)
def test_standard_output_is_json_alone(
    name: str, calibrated: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a library writes past Python's standard output would be seen, too."""
    directory, made = calibrated
    monkeypatch.chdir(directory)
    result = made if name == "calibrate" else run(name)
    allowed = {"calibrate": (0, 4), "verify": (0, 1)}.get(name, (0,))
    assert result.exit_code in allowed, result.output[-2000:]
    assert isinstance(json.loads(result.stdout), dict | list)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["eval", "bench"])
def test_what_a_library_prints_goes_to_stderr(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"adaattn_cli.{name}.use_threads", lambda threads: print("from a library"))
    result = run(name)
    assert "from a library" in result.stderr
    assert json.loads(result.stdout)
