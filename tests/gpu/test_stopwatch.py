"""The stopwatch of a CUDA device tells the device's time from the host's."""

import time
from typing import Any

import pytest
import torch

from adaattn_hf.stats import stopwatch

pytestmark = pytest.mark.gpu


def _medians(host: bool, busy: float = 3e-4) -> dict[str, float]:
    """Microseconds of a call that keeps the host so many seconds, and of one that keeps the device much longer."""
    small, large = torch.ones(16, device="cuda"), torch.randn(8192, 8192, device="cuda")

    def idle() -> Any:
        end = time.perf_counter() + busy
        while time.perf_counter() < end:
            pass
        return small.add_(1)

    runs = stopwatch.on_device({"host": idle, "device": lambda: large @ large}, host)
    return {name: stopwatch.quartiles(times)[1] * 1e6 for name, times in runs.items()}


def test_the_hosts_time_counts_only_where_it_is_asked_for() -> None:
    alone, both = _medians(False), _medians(True)
    assert both["host"] >= 300
    assert alone["host"] < both["host"] / 2
    assert alone["device"] > alone["host"]
    assert 0.2 < alone["device"] / both["device"] < 5  # others may compute on the device meanwhile


def test_a_host_that_takes_long_does_not_show_in_the_devices_time() -> None:
    """Its kernel waits behind writes that take longer still."""
    assert _medians(False, busy=2e-3)["host"] < 200


def _writes(count: int) -> float:
    """Microseconds of so many writes, as those before a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cold = torch.empty(stopwatch._COLD_BYTES, dtype=torch.int8, device="cuda")
    cold.zero_()
    begin.record()
    for _ in range(count):
        cold.zero_()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def test_a_call_that_waits_for_the_device_is_not_charged_the_writes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there are so many here that a slow host's way to the device and back is little beside them."""
    monkeypatch.setattr(stopwatch, "_WRITES", stopwatch._MOST_WRITES)
    small = torch.ones(16, device="cuda")
    runs = stopwatch.on_device({"waits": lambda: small.sum().item(), "runs on": lambda: small.sum()})
    assert stopwatch.quartiles(runs["waits"])[1] * 1e6 < _writes(stopwatch._MOST_WRITES) / 2
