"""What Triton needs beside itself before its first launch: a missing compiler is a reason, not a crash."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from adaattn_hf.backends import select
from adaattn_hf.backends.triton.backend import cannot_build


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without compilers."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.mark.parametrize("found", ["gcc", "clang"])
def test_a_compiler_on_the_path_is_enough(found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_headers(tmp_path, monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == found else None)
    assert cannot_build() == ()


def test_one_that_is_named_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_headers(tmp_path, monkeypatch)
    monkeypatch.setenv("CC", "tcc")
    assert cannot_build() == ()


def test_without_compiler_and_headers_both_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    compiler, headers = cannot_build()
    assert "install gcc, or set CC" in compiler
    assert f"no {tmp_path / 'Python.h'}" in headers


def test_the_backend_is_then_missing_and_calls_go_to_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    with_headers(tmp_path, monkeypatch)
    (reason,) = select.by_name("triton").missing()
    assert "no C compiler" in reason


def test_windows_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    assert cannot_build() == ()


def with_headers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(directory)})
