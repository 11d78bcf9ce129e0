"""The command line around its commands: quick help, version, completion, `doctor`, `run`, JSON."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from rich.console import Console

import adaattn_cli
import adaattn_hf
from adaattn_cli import app as application
from adaattn_cli import doctor
from adaattn_cli.commands import COMMANDS
from adaattn_cli.ending import ending
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.demo import demo_model_path
from adaattn_hf.patches.checkpoint import resolve_device
from adaattn_hf.stats.stopwatch import Elapsed

from ..support.command import adaattn, leaves, options_of
from ..support.warm import AS_A_MODULE, HERE, WarmInterpreter

QUICK = "import adaattn_cli, sys; sys.argv = ['adaattn', *{words!r}]; adaattn_cli.main()"
LOADED = """
import adaattn_cli, contextlib, io, json, sys
told = []
for words in json.loads(sys.argv[1]):
    sys.argv, code = ["adaattn", *words], None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            adaattn_cli.main()
        except SystemExit as end:
            code = end.code or 0
    told.append([code, sorted(set(sys.modules) & {"torch", "transformers", "numpy", "adaattn_hf"})])
print(json.dumps(told))
"""
"""Runs command lines one after the other; prints the exit code of each, and what is loaded by then of heavy modules."""
QUIET = [
    ("--help", 0), ("--version", 0), ("", 2), ("calibrate --no-such-option", 2), ("plan --help", 0),
    ("eval --windows none", 2), ("calibrate --lengths 4x", 2), ("bench --rounds 0", 2),
    *((f"{words} --help", 0) for words in leaves()),
]  # fmt: skip


def fresh(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *words], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return fresh("-c", code, **environment)


@pytest.fixture(scope="module")
def quiet() -> list[list[Any]]:
    """What each of `QUIET` ended with and had loaded, in one process."""
    done = fresh("-c", LOADED, json.dumps([words.split() for words, _ in QUIET]))
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("number", range(len(QUIET)), ids=[words or "alone" for words, _ in QUIET])
def test_what_runs_no_command_loads_nothing(number: int, quiet: list[list[Any]]) -> None:
    """Of the package neither: importing it would import Transformers."""
    assert quiet[number] == [QUIET[number][1], []]


def test_a_heavy_import_would_show() -> None:
    assert json.loads(fresh("-c", "import numpy\n" + LOADED, '[["--version"]]').stdout) == [[0, ["numpy"]]]


def test_a_command_runs_after_its_options_were_read(interpreter: WarmInterpreter, tmp_path: Path) -> None:
    """And one of a group does."""
    done = interpreter.run(QUICK.format(words=["doctor", "--json"]), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"adaattn-hf", "sdpa"} <= {finding["name"] for finding in json.loads(done.stdout)}
    done = interpreter.run(QUICK.format(words=["plan", "show", "no-such-plan"]), tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: plan: no-such-plan"), done.stderr[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="has no device that is full")
def test_a_full_disk_under_standard_output_is_a_sentence(interpreter: WarmInterpreter, tmp_path: Path) -> None:
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
    for words in (["doctor"], ["doctor", "--json"]):
        done = interpreter.run(full + QUICK.format(words=words), tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr[-2000:]
        assert done.stderr.startswith("error: standard output: No space left on device")


def test_closed_streams_are_none_to_a_command(interpreter: WarmInterpreter, tmp_path: Path) -> None:
    """Nor does a file take their numbers, to be written to by libraries."""
    closed = "import os, sys; sys.stdout = sys.stderr = None; os.closerange(1, 3)\n"
    same = "os.path.samestat(os.fstat({}), os.stat(os.devnull))"
    asked = f"import atexit; atexit.register(lambda: {same.format(1)} and {same.format(2)} or os._exit(9))\n"
    done = interpreter.run(closed + asked + QUICK.format(words=["doctor"]), tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def test_version_is_that_of_the_source_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout that was installed when it was older, or never."""
    monkeypatch.setattr("importlib.metadata.version", {"typer": "1"}.__getitem__)
    adaattn("--version", says=f"adaattn-hf {adaattn_hf.__version__}\n")


def test_help_pages_say_what_a_command_does_what_it_takes_and_how_it_ends() -> None:
    """A summary that is a sentence, paragraphs that the terminal alone breaks, exit codes below the options."""
    shown = " ".join(adaattn("--help").output.replace("│", "").split())
    for name, command in leaves().items():
        first = command.help.strip().partition("\n")[0]
        assert first.endswith("."), name
        assert first in shown or " " in name, name
        assert all("\n" not in part for part in command.help.split("\n\n")), name
        assert [one.name for one in command.params if one.name != "help" and not one.help] == [], name
        assert command.epilog.startswith("Exit codes: "), name
        assert "Exit codes" not in command.help


@pytest.mark.parametrize(
    ("words", "offered"),
    [("adaattn pl", "plan"), ("adaattn explain --js", "--json"), ("adaattn eval --padding r", "right")],
)
def test_the_shell_completes(words: str, offered: str) -> None:
    done = python(
        QUICK.format(words=[]), _ADAATTN_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" "))
    )
    assert offered in done.stdout.split()


def test_what_takes_a_model_takes_its_revision_and_code() -> None:
    for name in ("eval", "profile", "explain", "calibrate", "verify"):
        assert {"--revision", "--trust-remote-code", "--gguf-file"} <= options_of(leaves()[name]), name


@pytest.mark.parametrize(("word", "handler"), [("eval", adaattn_cli.interrupt), ("run", signal.default_int_handler)])
def test_ctrl_c_before_there_is_a_command_leaves_no_traceback(
    word: str, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "run", Mock(side_effect=[None, KeyboardInterrupt]))
    monkeypatch.setattr(sys, "argv", ["adaattn", word])
    hook, before = sys.unraisablehook, signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys, "unraisablehook", hook)
    thread = threading.Thread(target=adaattn_cli.main)
    thread.start()
    thread.join()
    assert sys.unraisablehook is hook, "the process belongs to whoever has the main thread"
    with pytest.raises(SystemExit) as end:
        adaattn_cli.main()
    assert (end.value.code, signal.signal(signal.SIGINT, before)) == (130, handler)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["__del__", "finalize", "ref"])
def test_a_signal_in_a_finalizer_counts(kind: signal.Signals, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where garbage is collected, which Python code sees nowhere else; only a reference's is cut off."""
    monkeypatch.setattr(sys, "unraisablehook", adaattn_cli.unraisable)
    times: list[float] = []

    def finalizer(_: Any = None) -> None:
        times.append(time.monotonic())
        signal.raise_signal(kind)
        times.append(time.monotonic())

    class Finalized:
        def __del__(self) -> None:
            if how == "__del__":
                finalizer()

    def collect() -> None:
        held = Finalized()
        watches: dict[str, Any] = {"ref": weakref.ref, "finalize": weakref.finalize}
        _watch = watches.get(how, lambda *_: None)(held, finalizer)
        del held
        # it is first sent again while this thread keeps the others waiting, and does not sleep yet
        time.sleep(type("Late", (), {"__index__": staticmethod(partial(min, range(60, 3_000_000)))})())

    before = signal.signal(signal.SIGINT, adaattn_cli.interrupt)
    with pytest.raises(typer.Exit) as end, ending(kept=lambda: "nothing"):
        collect()
    signal.signal(signal.SIGINT, before)
    assert (end.value.exit_code, len(times)) == (128 + kind, 1 if how == "ref" else 2)
    assert time.monotonic() - times[0] < 30, "no sleep is waited for"


@pytest.mark.usefixtures("untimed")
def test_a_bar_of_another_library_is_drawn_in_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    adaattn("doctor", code=(0, 1))
    assert os.environ.pop("TQDM_DISABLE") == "1"
    adaattn("run", "nothing", code=2)
    assert "TQDM_DISABLE" not in os.environ, "what a program draws is its own"
    draws = "import tqdm.auto; list(tqdm.auto.tqdm([1]))"
    assert "1/1" in python(draws).stderr
    assert not python(draws, TQDM_DISABLE="1").stderr


def test_an_interrupted_import_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = Mock(side_effect=[KeyboardInterrupt, OSError("libx.so: cannot be opened")])
    monkeypatch.setattr(application, "importlib", Mock(import_module=imports))
    adaattn("eval", code=130, says="interrupted")
    # a library that cannot be loaded is no matter of standard output's
    assert isinstance(adaattn("eval", code=1).exception, OSError)


# --- run

USES = """
import sys, transformers
import beside  # a module in the program's directory
sizes = dict(vocab_size=8, n_embd=8, n_layer=1, n_head=2, n_positions=8)
config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="adaattn")
print(model.config._attn_implementation, *sys.argv[1:])
sys.exit(7)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "program.py"
    path.write_text(USES)
    return str(path)


def test_run_makes_the_name_known_and_hands_through_arguments_and_exit_code(
    program: str, interpreter: WarmInterpreter
) -> None:
    """In a process of its own, and a module in a copy of one."""
    words = ["--attn_implementation", "adaattn", "--help"]
    place = Path(program).parent
    for done in (
        fresh("-m", "adaattn_hf", "run", program, *words),
        interpreter.run(AS_A_MODULE, place, "run", "-m", "program", *words),
    ):
        assert done.returncode == 7, done.stderr[-2000:]
        assert done.stdout.split() == ["adaattn", *words]


def test_without_run_the_same_program_fails(program: str, interpreter: WarmInterpreter) -> None:
    done = interpreter.run(HERE + USES, Path(program).parent)
    assert done.returncode == 1
    assert "adaattn" in done.stderr


def test_run_finds_the_programs_of_an_environment_that_is_not_activated(
    interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    elsewhere = "import os; os.environ['PATH'] = '/nowhere'\n"
    done = interpreter.run(elsewhere + AS_A_MODULE, tmp_path, "run", "--", "pytest", "--version")
    assert done.stdout.startswith("pytest "), done.stderr[-2000:]


def test_run_refuses_what_is_no_program() -> None:
    adaattn("run", "--", "no-such-program", "--help", code=2, says="no-such-program")
    adaattn("run", "python", "x.py", code=2, says="Python itself is not named")


def test_an_encoding_that_lacks_a_sign_is_printed_to() -> None:
    """As of a pipe on Windows."""
    done = python(QUICK.format(words=["run", "--help"]), PYTHONIOENCODING="ascii", COLUMNS="200")
    assert done.returncode == 0, done.stderr[-2000:]
    assert r"\u2026" in done.stdout


def test_a_command_that_keeps_nothing_says_the_file_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), ending(default="out"):
        raise OSError(28, "No space left on device")
    assert capsys.readouterr().err == "error: file: out: No space left on device\n"


# --- doctor


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` knows at once what another dtype would gain."""
    monkeypatch.setattr(doctor, "in_turn", lambda *_: {1: [Elapsed(1.0, 0.0)], 2: [Elapsed(1.0, 0.0)]})


def findings() -> tuple[int, dict[str, dict[str, str]]]:
    result = adaattn("doctor", "--json", code=(0, 1))
    return result.exit_code, {finding["name"]: finding for finding in json.loads(result.output)}


def test_doctor_tells_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = findings()
    assert (code, found["adaattn-hf"]["state"]) == (0, adaattn_hf.__version__)
    assert {"torch", "transformers", "native kernels", "sdpa"} <= set(found)
    assert not found["torch"]["remedy"]
    for seconds, words in ((2.0, "2.0 times as fast as float32"), (1.1, "no faster")):
        monkeypatch.setattr(doctor, "in_turn", lambda *_, s=seconds: {1: [Elapsed(s, 0.0)], 2: [Elapsed(1.0, 0.0)]})
        assert findings()[1]["bfloat16"]["state"].startswith(words)


@pytest.mark.usefixtures("untimed")
def test_doctor_names_the_remedy_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "" if name == "torch" else "9999")
    monkeypatch.setattr(doctor, "library", lambda: None)
    monkeypatch.setattr(doctor, "missing", lambda: ("not built",))
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    code, found = findings()
    assert code == 1
    assert found["torch"]["remedy"].startswith("pip install 'torch")
    assert found["transformers"]["remedy"], "9999 is beyond the bound"
    adaattn("doctor", code=1, says=("missing torch: pip install 'torch", "native kernels: not built; apt install g++"))


@pytest.mark.usefixtures("untimed")
def test_doctor_names_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    code, found = findings()
    assert (code, found["adaattn-hf"]["remedy"]) == (1, "pip install the checkout")


@pytest.mark.usefixtures("untimed")
def test_doctor_says_in_ten_lines_what_is_here_and_why_backends_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "80")
    output = adaattn("doctor").output
    assert len(output.splitlines()) <= 10, output
    assert max(map(len, output.splitlines())) <= 80
    said = " ".join(output.split())
    assert f"torch {torch.__version__}" in said
    assert "fa4, fa3, fa3_fwd, fa2, triton: CUDA only, no GPU here" in said
    assert "pip install" not in said, "of what may well be absent"


def test_brackets_that_doctor_found_are_no_markup() -> None:
    console = Console(width=80, record=True)
    console.print(doctor.table([doctor.Finding("versions", "torch", "a[b]", "pip install c[d]")]))
    assert "torch: a[b]; pip install c[d]" in console.export_text()


@pytest.mark.parametrize("words", ["eval", "calibrate", "doctor"])
def test_help_names_no_type_of_flags(words: str) -> None:
    """But of `--help`, which is typer's own."""
    lines = adaattn(words, "--help", width=120).output.splitlines()
    assert [line for line in lines if "<bool>" in line] == [line for line in lines if "--help  -h" in line]


@pytest.mark.parametrize("words", leaves())
def test_help_cuts_no_name_off(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal of 80 columns; `run` writes an ellipsis of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    page = adaattn(*words.split(), "--help", width=None).output
    assert "…" not in page.replace("…`", "")
    assert {option for option in options_of(leaves()[words]) if option.startswith("--") and option not in page} == set()


def test_help_begins_with_what_most_people_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """In panels, each of whose names is an option; the exit codes come last."""
    for name in ("calibrate", "eval", "bench", "profile", "verify"):
        panels: dict[str, list[str]] = {}
        for parameter in leaves()[name].params:
            if parameter.param_type_name == "option" and parameter.name != "help":
                panels.setdefault(parameter.rich_help_panel, []).append(parameter.name)
        wanted = COMMANDS[name].panels
        assert [*panels] == [*wanted, "Advanced"], name
        assert {panel: tuple(panels[panel]) for panel in wanted} == wanted
        assert len(panels["Basic"]) <= 8
    monkeypatch.setenv("COLUMNS", "80")
    page = adaattn("calibrate", "--help", width=None).output
    places = [
        page.index(words) for words in ("─ Basic ─", "─ Verification ─", "─ Search ─", "─ Advanced ─", "Exit codes:")
    ]
    assert places == sorted(places)


def test_a_group_completes_under_the_name_of_the_program_alone() -> None:
    assert "--install-completion" not in adaattn("plan", "--help").output
    assert "--install-completion" in adaattn("--help").output


# --- devices

WITH_DEVICE = [name for name, command in leaves().items() if "--device" in options_of(command)]


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cuda:99") for name in WITH_DEVICE), *(("eval", device) for device in ("gpu", "cuda:x", "meta"))],
)
def test_a_device_that_is_not_here_is_one_sentence_at_every_command(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read or made; a command that explains may speak of a GPU that is elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if (name, device) == ("explain", "cuda:99"):
        device = "cuda:999"
    required = [p for p in leaves()[name].params if p.required]
    words = [name, *[str(demo_model_path("llama"))] * len(required), "--device", device]
    done = adaattn(*words, code=2)
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1, done.stderr
    known = "cpu, cuda" if name == "explain" else "auto or cpu"
    assert done.stderr.startswith(f"error: device: got {device!r}, expected {known}"), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("count", "says"), [
    (0, "device: got 'cuda:2', expected auto or cpu, since torch sees no CUDA devices here; give --device cpu"),
    (1, "expected auto or cpu or cuda or cuda:0, since torch sees 1 CUDA device here; give --device cuda"),
    (
        2,
        "expected auto or cpu or cuda or cuda:0 or cuda:1, since torch sees 2 CUDA devices here; "
        "give --device cuda",
    ),
])  # fmt: skip
def test_the_sentence_names_the_devices_that_are_here(count: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UsageError) as refused:
        resolve_device("cuda:2")
    assert str(refused.value).endswith(says)
    assert resolve_device(None).type == resolve_device("auto").type == ("cuda" if count else "cpu")
    if count:
        assert resolve_device(f"cuda:{count - 1}") == torch.device("cuda", count - 1)


# --- JSON


@pytest.mark.native
def test_explain_speaks_of_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["explain", str(demo_model_path("llama")), "--device", "cuda", "--dtype", "bfloat16"]
    adaattn(*words, says=("head_dim 32, 4 query heads per key/value head, cuda]", "CPU only: native"))
    adaattn(*words, "--verbose", says="not native: the native kernels run on CPUs")
