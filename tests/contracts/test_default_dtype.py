"""`torch.set_default_dtype` is the user's: it changes no answer, since every tensor of ours names its dtype."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ..support.source_tree import ROOT


def answers(dtype: str) -> dict[str, str]:
    """Digests of what a process of its own computes, in which nothing was remembered under another default."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.core_calls", dtype],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_no_answer_depends_on_the_default_dtype() -> None:
    usual, other = answers("float32"), answers("bfloat16")
    assert len(usual) > 100
    assert [name for name, digest in usual.items() if other.get(name) != digest] == []
