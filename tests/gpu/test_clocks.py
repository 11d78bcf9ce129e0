"""The clock of a CUDA device tells the device's time from the host's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from adaattn_hf.backends.clocks import clock_of, quartiles

pytestmark = pytest.mark.gpu


def _medians(host: bool, busy: float = 3e-4) -> dict[str, float]:
    """Microseconds of a call that keeps the host so many seconds, and of one that keeps the device much longer."""
    small, large = torch.ones(16, device="cuda"), torch.randn(8192, 8192, device="cuda")

    def idle() -> Any:
        end = time.perf_counter() + busy
        while time.perf_counter() < end:
            pass
        return small.add_(1)

    runs = clock_of("cuda", host)({"host": idle, "device": lambda: large @ large})
    return {name: quartiles(times)[1] for name, times in runs.items()}


def test_the_hosts_time_counts_only_where_it_is_asked_for() -> None:
    alone, both = _medians(False), _medians(True)
    assert both["host"] >= 300
    assert alone["host"] < both["host"] / 2
    assert alone["device"] > alone["host"]
    assert 0.5 < alone["device"] / both["device"] < 2


def test_a_host_that_takes_long_does_not_show_in_the_devices_time() -> None:
    """Its kernel waits behind writes that take longer still."""
    assert _medians(False, busy=2e-3)["host"] < 200


def test_a_call_that_waits_for_the_device_is_not_charged_the_writes_before_it() -> None:
    small = torch.ones(16, device="cuda")
    runs = clock_of("cuda", True)({"waits": lambda: small.sum().item(), "runs ahead": lambda: small.sum()})
    assert quartiles(runs["waits"])[1] < 1000
