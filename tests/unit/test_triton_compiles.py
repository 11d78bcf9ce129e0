"""The Triton kernels compile for devices that are not here: the interpreter takes code that the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..support.source_tree import ROOT

pytest.importorskip("triton", minversion="3.6", reason="Gluon came with Triton 3.6")

KERNELS = {"decode", "forward", "over_lists", "prepare", "of_keys", "of_queries", "decode_codes", "choose"}
FOR = {90: {"specialised"}}
"""Those that one compute capability has to itself."""
SHARED = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may take, by compute capability (CUDA C++ Programming Guide)."""


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_and_fit(capability: int, checkout: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled", str(capability)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in found} >= KERNELS | FOR.get(capability, set())
    assert max(int(size) for _, size in found) <= SHARED[capability]
