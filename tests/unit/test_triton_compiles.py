"""The Triton kernels compile for devices that are not here, and what calls launch there fits their shared memory.

The interpreter takes code that the compiler refuses. Here are the calls that come closest to a device's limit, and one
of each kernel; `make compiled` has all of them.
"""

import json
import os
import subprocess
import sys

import pytest

from adaattn_hf.backends.capability import of_sm

from ..support.source_tree import ROOT

pytest.importorskip("triton", minversion="3.6", reason="Gluon came with Triton 3.6")

CLOSEST = (
    "plain, heads of 256, gradients", "step over pages, heads of 256, 8 sharing keys, float32",
    "step of a graph, heads of 256, 8 sharing keys, float32",
    "step of a graph over k8v4, heads of 256, 8 sharing keys, bfloat16",
    "storing k8v4, heads of 256, 8 sharing keys, float32",
)  # fmt: skip
"""Calls that take most of each device's memory, and one of each kernel."""
NARROWER = ("plain, heads of 128, gradients", "packed, heads of 128, windows per head, gradients")
"""Calls that come close where a device has little memory, or a kernel of its own."""
OTHERS = (
    "plain, heads of 64, gradients", "plain, heads of 96, windows per head",
    "padded, heads of 256, windows per head, gradients", "windowed, heads of 64",
    "softcap, heads of 256, gradients", "step, heads of 64, 8 sharing keys, bfloat16",
    "step, heads of 256, 8 sharing keys, bfloat16, windows per head",
    "step, heads of 128, 71 sharing keys, bfloat16", "step over pages, heads of 128, 71 sharing keys, bfloat16",
    "step over int8, heads of 128, 8 sharing keys, bfloat16",
    "step over k8v4, heads of 256, 8 sharing keys, bfloat16",
)  # fmt: skip
DEVICES = {86: CLOSEST + NARROWER + OTHERS, 80: CLOSEST, 90: CLOSEST + NARROWER, 120: CLOSEST + NARROWER}
"""Calls by compute capability, where programs have least: 89 has the instructions and memory of 86, 120 its memory."""
KERNELS = {
    "combine", "cut_runs", "decode", "decode_codes", "forward", "of_keys", "of_queries", "order_blocks", "prepare",
    "repeat_run", "store_tokens",
}  # fmt: skip
HOPPER = {"specialised", "cost_items", "deal_items"}
"""Those that one compute capability has to itself."""


def compiled(sm: int, calls: tuple[str, ...], *more: str) -> subprocess.CompletedProcess[str]:
    """Another process compiles what these calls launch: in this one kernels are interpreted."""
    return subprocess.run(
        [sys.executable, "-m", "studies.compiled", str(sm), *more, "--calls", *calls], cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONSAFEPATH": ""}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("sm", DEVICES)
def test_kernels_compile_and_fit(sm: int) -> None:
    done = compiled(sm, DEVICES[sm], "--lines")
    assert done.returncode == 0, done.stderr[-4000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = {one["kernel"] for one in launches}
    assert kernels == KERNELS | (HOPPER if sm == 90 else set())  # and none is refused
    limit = of_sm(divmod(sm, 10)).shared_memory
    assert [one for one in launches if one["shared"] > limit] == []


def test_what_does_not_fit_is_found() -> None:
    """Planted: the backend takes the device for one whose programs have more."""
    done = compiled(86, ("plain, heads of 256, gradients",), "--believed", "80")
    assert done.returncode == 1
    assert "sm_86: of_keys 32/64/8/2 takes" in done.stderr
    assert "of 101,376 bytes (plain, heads of 256, gradients)" in done.stderr
