"""What a call of causal attention at 4,096 tokens adds to the resident memory of a process, beside torch's own."""

import os
from pathlib import Path

import pytest

from ..support.processor import ROUNDS_BF16, TILES_BF16
from ..support.warm import WarmInterpreter

MEASURED = """
import sys
import torch
import adaattn_hf
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import attend

way, dtype, threads = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)


def call(q, k, v):
    if way == "stock":
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attend(AttentionCall(q, k, v, MaskStructure(1, q.shape[2], q.shape[2], causal=True), 0.125)).out


def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


with torch.no_grad():
    call(*(torch.randn(1, 12, 64, 64, dtype=dtype) for _ in range(3)))  # libraries and threads are there
    q, k, v = (torch.randn(1, 12, 4096, 64, dtype=dtype) for _ in range(3))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is now what is resident
    before = peak()
    out = call(q, k, v)
    print(peak() - before, out.numel() * out.element_size())
"""


def growth(interpreter: WarmInterpreter, way: str, dtype: str, threads: int) -> tuple[int, int]:
    """Bytes that became resident in one call in a process of its own, and those of the output."""
    done = interpreter.run(MEASURED, Path.cwd(), way, dtype, str(threads))
    assert done.returncode == 0, done.stderr
    grown, output = map(int, done.stdout.split())
    return grown, output


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, which tells peaks apart")
@pytest.mark.parametrize(
    ("dtype", "threads", "most"), [("float32", 2, 1.0), ("bfloat16", 1, 0.6 if TILES_BF16 else 1.0)]
)
def test_causal_4k_beside_memory_of_sdpa(dtype: str, threads: int, most: float, interpreter: WarmInterpreter) -> None:
    """In float32 each thread packs one tile of keys and values, less than what sdpa works with.

    In bfloat16 sdpa packs all keys and values of a head, but only for AMX tiles.
    """
    if dtype == "bfloat16" and not ROUNDS_BF16:
        pytest.skip("without instructions for bfloat16 keys and values are dequantised to float32")
    ours, output = growth(interpreter, "ours", dtype, threads)
    stock, _ = growth(interpreter, "stock", dtype, threads)
    # the output itself is counted, so that a measurement that sees nothing is found out
    assert 0.9 * output < ours
    assert ours <= most * stock, f"{ours / 2**20:.1f} MiB, {stock / 2**20:.1f} of sdpa, output {output / 2**20:.0f}"
