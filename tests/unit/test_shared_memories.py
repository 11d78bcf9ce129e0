"""What is remembered for all calls may be filled and emptied by several threads at once."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from adaattn_hf.backends import select
from adaattn_hf.plans import store

from ..support.calls import kind_with

KIND = kind_with()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads take turns as often as can be, over memories that hold little."""
    monkeypatch.setattr(select, "launches", {})
    monkeypatch.setattr(select, "MAX_KINDS", 4)
    monkeypatch.setattr(store, "_tensors", {})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-9)
    yield
    sys.setswitchinterval(interval)


KERNEL: Any = print


def at_once(work: Callable[[int], None], threads: int = 8) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def test_more_kinds_than_are_remembered() -> None:
    def work(thread: int) -> None:
        for turn in range(50_000):
            kind = KIND._replace(head_dim=thread, pairs=turn)
            assert select.store_kernel(select.launches, (kind, None), KERNEL) is KERNEL

    at_once(work)
    assert len(select.launches) <= select.MAX_KINDS + 8


def test_tensors_that_are_in_use_are_there() -> None:
    names = [store.remember_tensors({"layers.0.key_mean": torch.full((1,), float(one))}) for one in range(4)]

    def work(thread: int) -> None:
        for _ in range(20_000):
            assert store.tensors_of(names[thread % 4])

    at_once(work)
