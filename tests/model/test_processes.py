"""One model in several threads, and in a process that was forked: the same bits."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ..support.models import answers, fresh_pair, tokens


def logits(model: torch.nn.Module, length: int) -> torch.Tensor:
    return answers(model, input_ids=tokens(batch=2, length=length))[0]


def test_threads_share_a_model() -> None:
    _, model = fresh_pair("llama")
    lengths = [3 + i % 7 for i in range(64)]
    right = {length: logits(model, length) for length in set(lengths)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda length: logits(model, length), lengths))
    for length, one in zip(lengths, found, strict=True):
        assert torch.equal(one, right[length])


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python warns of forks beside threads
def test_a_forked_process_computes_the_same() -> None:
    _, model = fresh_pair("llama")
    right = logits(model, 9)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if torch.equal(logits(model, 9), right) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
