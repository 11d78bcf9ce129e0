"""Building, loading, and the words for when that is not possible."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from adaattn_cli.app import app
from adaattn_hf.backends.native import build, library
from adaattn_hf.errors import UsageError
from adaattn_hf.patches.call.interface import attention_function

from ..support.warm import WarmInterpreter
from .sanitize import compile_fuzzers

NATIVE = Path(build.__file__).parent


@pytest.mark.parametrize("named", ["/nonexistent/c++", "'unfinished"])
def test_without_a_compiler_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("CXX", named)
    report = build.build(tmp_path)
    assert report["built"] is False
    assert "no C++ compiler" in str(report["reason"])
    assert json.loads((tmp_path / build.REPORT).read_text()) == report
    reason = library.load(tmp_path)
    assert isinstance(reason, str)
    assert "no C++ compiler" in reason


FULL = """#!/bin/sh
case "$*" in *-mamx-tile*-DADA_NS*) echo "error writing: No space left on device" >&2; exit 1 ;; esac
for last; do :; done; [ "$last" = --version ] || echo > "$last"
"""


@pytest.mark.parametrize("named", ["/nonexistent/c++", "false", FULL, "#!/nonexistent\n"])
def test_a_build_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """Neither the library of an earlier build of these sources, nor an instruction set for which there was no room."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    old, script = tmp_path / build.NAME, tmp_path / "c++"
    old.write_bytes(b"old")
    script.write_text(named)
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script) if named.startswith("#!") else named)
    sources = shutil.copytree(build.SOURCES, tmp_path / "src")
    monkeypatch.setattr(build, "SOURCES", sources)
    assert "earlier build" not in str(build.build(tmp_path)["reason"])
    assert not old.exists(), "nobody knows what it was made of"
    (tmp_path / build.REPORT).write_text(json.dumps(build.build(tmp_path)))
    old.write_bytes(b"old")
    report = build.build(tmp_path)
    assert (report["built"], report["levels"], old.read_bytes()) == (False, [], b"old")
    assert "the library of an earlier build stays" in str(report["reason"])
    assert ("the compiler failed" in str(report["reason"])) == (named in ("false", FULL))
    assert {one.name for one in tmp_path.iterdir()} <= {build.NAME, build.REPORT, "c++", "src"}
    reason = str(build.build(old / "below")["reason"])
    assert re.search("Not a directory.* run `python -m adaattn_hf.backends.native`", reason)
    (sources / "rows.hpp").write_text("// changed")
    assert "earlier build" not in str(build.build(tmp_path)["reason"])
    assert not old.exists(), "it computes what other sources say"


def test_a_platform_without_a_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    report = build.build(tmp_path)
    assert report["built"] is False
    assert report["reason"] == "no build for the platform 'win32'; Linux and macOS have one"


@pytest.mark.parametrize(("machine", "names"), [("arm64", ["portable", "neon"]), ("riscv64", ["portable"])])
def test_other_processors_have_levels_of_their_own(machine: str, names: list[str]) -> None:
    assert list(build.levels(machine)) == names


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / build.NAME).write_bytes(b"not an object file")
    reason = library.load(tmp_path)
    assert isinstance(reason, str)
    assert "cannot be loaded" in reason


@pytest.mark.skipif(bool(library.missing()), reason="; ".join(library.missing()) or "present")
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_a_library_that_is_cut_off_is_a_reason(tmp_path: Path, share: float) -> None:
    whole = (NATIVE / build.NAME).read_bytes()
    (tmp_path / build.NAME).write_bytes(whole[: int(len(whole) * share)])
    reason = library.load(tmp_path)
    assert isinstance(reason, str)
    assert "reinstall adaattn-hf" in reason


STUBS = {
    "lacks a function of its interface": {"abi_version": library.ABI_VERSION},
    "speaks interface 99": dict.fromkeys(library.FUNCTIONS, 99),
    "with (7, 7) bytes of arguments": dict.fromkeys(library.FUNCTIONS, 7) | {"abi_version": library.ABI_VERSION},
    f"with ({library.SIZES[0]}, 7) bytes": dict.fromkeys(library.FUNCTIONS, 7)
    | {"abi_version": library.ABI_VERSION, "args_size": library.SIZES[0]},
    "names instruction set 77": dict.fromkeys(library.FUNCTIONS, 77)
    | {"abi_version": library.ABI_VERSION, "args_size": library.SIZES[0], "store_size": library.SIZES[1]},
}


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("complaint", STUBS)
def test_a_foreign_library_is_a_reason(tmp_path: Path, complaint: str) -> None:
    source = tmp_path / "stub.cpp"
    functions = STUBS[complaint]
    source.write_text("".join(f'extern "C" long ada_{name}() {{ return {n}; }}\n' for name, n in functions.items()))
    command = build.compiler()
    assert command is not None
    subprocess.run([*command, "-shared", "-fPIC", str(source), "-o", str(tmp_path / build.NAME)], check=True)
    reason = library.load(tmp_path)
    assert isinstance(reason, str)
    assert complaint in reason
    assert "reinstall adaattn-hf" in reason


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"reason": ""}', '{"reason": ', "\udcff"])
def test_a_broken_report_of_the_build_is_a_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / build.REPORT).write_bytes(text.encode("utf-8", "surrogateescape"))
    reason = library.load(tmp_path)
    assert isinstance(reason, str)
    assert "the report of its build" in reason
    assert "python -m adaattn_hf.backends.native" in reason


@pytest.mark.skipif(bool(library.missing()), reason="; ".join(library.missing()) or "present")
def test_an_unknown_level_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = "neon" if platform.machine() == "x86_64" else "avx2"
    for name, words in (("avx1024", "expected one of amx, avx2"), (elsewhere, "expected one of .*portable")):
        monkeypatch.setenv(library.LEVEL_VARIABLE, name)
        with pytest.raises(UsageError, match=f"ADAATTN_NATIVE_LEVEL: got '{name}', {words}"):
            library.load(NATIVE)
    monkeypatch.setenv(library.LEVEL_VARIABLE, "portable")
    found = library.load(NATIVE)
    assert isinstance(found, library.Library)
    assert found.level_name == "portable"


@pytest.mark.parametrize("backend", [None, "native"])
def test_an_unknown_level_is_said_by_every_call_that_asks_for_one(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    """Another backend in its place would be slower without a word."""
    monkeypatch.setenv(library.LEVEL_VARIABLE, "garbage")
    monkeypatch.setattr(library, "_opened", None)
    query = torch.randn(1, 3, 5, 40)
    for _ in range(2):
        with pytest.raises(UsageError, match="ADAATTN_NATIVE_LEVEL: got 'garbage', expected one of"):
            attention_function(backend)(nn.Module(), query, query, query, None)
    attention_function("sdpa")(nn.Module(), query, query, query, None)


def test_doctor_names_a_level_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.LEVEL_VARIABLE, "garbage")
    monkeypatch.setattr(library, "_opened", None)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    states = {one["name"]: one["state"] for one in json.loads(done.stdout)}
    for name in ("native kernels", "native"):
        assert "ADAATTN_NATIVE_LEVEL: got 'garbage'" in states[name]


@pytest.mark.skipif(bool(library.missing()), reason="; ".join(library.missing()) or "present")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_no_second_openmp_runtime_is_loaded(interpreter: WarmInterpreter, tmp_path: Path) -> None:
    code = """
import torch
def runtimes():
    import re
    return sorted({line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/lib(gomp|omp|iomp5)\\b", line)})
torch.set_num_threads(2)
torch.randn(300, 300) @ torch.randn(300, 300)
before = runtimes()
from adaattn_hf.backends.native import launch, library
q = torch.randn(1, 4, 500, 64)
launch.forward(q, q, q, 0.125)
assert "OpenMP runtime that torch has loaded" in library.library().threads, library.library().threads
assert before and runtimes() == before, (before, runtimes())
"""
    done = interpreter.run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_library_leaves_openmp_and_torch_unnamed() -> None:
    if library.missing() or shutil.which("nm") is None:
        pytest.skip("needs the library and nm")
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(NATIVE / build.NAME)], capture_output=True, text=True, check=True
    ).stdout
    assert not any(word in symbols for word in ("GOMP_", "omp_", "torch", "c10", "Py_"))


@pytest.mark.slow
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_fuzz_under_sanitizers(tmp_path: Path) -> None:
    levels = ["portable", library.level_names()[-1]] if library.level_names() else None
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    programs = compile_fuzzers(tmp_path, levels, "-O0")  # which compiles in a third of the time
    for program, cases in zip(programs, ("40", "400"), strict=True):
        done = subprocess.run([str(program), "1", cases], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_all_functions_of_the_header_are_looked_for() -> None:
    """One that is not is taken to return 32 bits, and is missed at its first call alone."""
    header = (build.SOURCES / "adaattn.h").read_text(encoding="utf-8")
    assert set(re.findall(r"^(?:int64_t|void) ada_(\w+)\(", header, re.MULTILINE)) == set(library.FUNCTIONS)


def test_levels_have_the_numbers_of_the_header() -> None:
    header = (build.SOURCES / "adaattn.h").read_text(encoding="utf-8")
    (names,) = re.findall(r"enum ada_level \{(.*?)\}", header)
    numbers = {name.removeprefix("ADA_").lower(): int(n) for name, n in re.findall(r"(\w+) = (\d+)", names)}
    assert numbers == {name: number for number, name in enumerate(library.LEVELS)}
