"""A GPU suite that nobody could run is not green where a GPU is asked for."""

import os
import subprocess
import sys

import pytest

from ..support.source_tree import ROOT


@pytest.mark.parametrize(
    ("options", "code"), [(("-p", "no:xdist"), 0), (("-n", "1", "--require-gpu"), 1)], ids=["as it is", "required"]
)
def test_skipped_gpu_tests_are_counted_and_refused(options: tuple[str, ...], code: int, checkout: object) -> None:
    """Also where one process reports what others skipped."""
    command = [sys.executable, "-m", "pytest", "-q", *options, "tests/gpu/test_stopwatch.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "BLOCKED: " in done.stdout
