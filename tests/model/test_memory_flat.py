"""A process that goes on for long holds no more memory than at its start."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import adaattn_hf

from ..support.models import fresh_pair, tokens

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
CALLS, MOST = 300, 1 << 19


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def work() -> dict[str, Callable[[int], object]]:
    model, trained = (fresh_pair("llama", num_hidden_layers=1).ours for _ in range(2))
    optimiser = torch.optim.SGD(trained.parameters(), lr=1e-4)
    ids = tokens(batch=1, length=8)

    def generate(i: int) -> object:
        return model.generate(ids[:, : 2 + i % 6], max_new_tokens=2, do_sample=False, pad_token_id=0)

    def train(i: int) -> object:
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss

    return {
        "generate": generate, "train": train, "prepare": lambda i: adaattn_hf.restore(adaattn_hf.prepare(model)),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "train", "prepare"])
def test_memory_stays_flat_over_hundreds_of_calls(name: str) -> None:
    once = work()[name]
    for i in range(CALLS // 3):
        once(i)
    before = resident()
    for i in range(CALLS):
        once(i)
    assert resident() - before < MOST
