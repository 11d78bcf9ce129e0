"""What is remembered for all calls may be filled and emptied by several threads at once."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.plans import store

from ..support.calls import kind_with

KIND = kind_with()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads take turns as often as can be, over memories that hold little."""
    monkeypatch.setattr(select, "plain_kernels", {})
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
            assert select.store_kernel(select.plain_kernels, (kind, None), KERNEL) is KERNEL

    at_once(work)
    assert len(select.plain_kernels) <= select.MAX_KINDS + 8


class Emptied(dict[Any, Any]):
    """A memory that another thread empties after each look whether something is there."""

    def __contains__(self, key: object) -> bool:
        there = super().__contains__(key)
        self.clear()
        return there

    def get(self, key: Any, default: Any = None) -> Any:
        return default  # nothing was there yet


def test_a_kernel_that_others_push_out_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 2, 8)
    call = AttentionCall(x, x, x, MaskStructure(1, 2, 2), 1.0)
    monkeypatch.setattr(select, "plain_kernels", Emptied({(call.checked_kind(), None): KERNEL}))
    assert select.kernel_of(call) is KERNEL


class Watched(dict[str, Any]):
    """A memory that another thread reads when something is taken out for the first time."""

    read: Future[Any] | None = None

    def pop(self, name: str, *default: Any) -> Any:
        value = super().pop(name, *default)
        if self.read is None:
            self.read = ThreadPoolExecutor(1).submit(store.tensors_of, name)
            wait([self.read], timeout=0.2)  # a reader that must not look now waits for as long
        return value


def test_tensors_that_move_to_the_end_are_there_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    name = store.remember_tensors({"layers.0.key_mean": torch.ones(1)})
    watched = Watched(store._tensors)
    monkeypatch.setattr(store, "_tensors", watched)
    assert store.tensors_of(name)
    assert watched.read is not None
    assert watched.read.result(timeout=30) == store.tensors_of(name)


def test_tensors_that_are_in_use_are_there() -> None:
    names = [store.remember_tensors({"layers.0.key_mean": torch.full((1,), float(one))}) for one in range(4)]

    def work(thread: int) -> None:
        for _ in range(20_000):
            assert store.tensors_of(names[thread % 4])

    at_once(work)
