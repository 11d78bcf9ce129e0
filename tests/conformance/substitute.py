"""Pytest plugin: puts one attention implementation in the place of stock `sdpa` and writes down what happens.

Loaded with `-p substitute` by `run.py`. The environment says what to do:

* `CONFORMANCE_NAME`: the implementation to run; `sdpa` leaves everything as it is.
* `CONFORMANCE_FORCE`: `1` also puts it where a family declares that stock `sdpa` cannot serve it.
* `CONFORMANCE_RESULTS`: file for one JSON line per test.
"""

import json
import os
import random
import sys
import zlib
from typing import Any

import pytest
import torch

NAME = os.environ.get("CONFORMANCE_NAME", "sdpa")
FORCE = os.environ.get("CONFORMANCE_FORCE") == "1"
RESULTS = os.environ["CONFORMANCE_RESULTS"]

_calls = 0
_calls_at_start = 0


def pytest_configure(config: pytest.Config) -> None:
    """Register the implementation and let every request for `sdpa` resolve to it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if NAME == "sdpa":
        return
    from transformers import AttentionInterface
    from transformers.modeling_utils import PreTrainedModel

    import adaattn_hf  # noqa: F401  registers the names

    served = AttentionInterface._global_mapping[NAME]

    def counted(*args: Any, **kwargs: Any) -> Any:
        global _calls
        _calls += 1
        return served(*args, **kwargs)

    AttentionInterface.register(NAME, counted)
    stock = PreTrainedModel.get_correct_attn_implementation

    def resolved(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        selectable = type(self)._can_set_attn_implementation()
        if FORCE and selectable and requested_attention in (None, "sdpa"):
            return NAME
        answer: str = stock(self, requested_attention, is_init_check)
        return NAME if answer == "sdpa" and selectable else answer

    # The harness, not the product, stands in for sdpa; the product replaces nothing of Transformers.
    PreTrainedModel.get_correct_attn_implementation = resolved


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count this test's calls, of inputs that chance draws alike; in force mode say that the family supports `sdpa`."""
    global _calls_at_start
    _calls_at_start = _calls
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    mixins = sys.modules.get("tests.test_modeling_common")
    if mixins is not None:
        mixins.global_rng.seed(seed)
    owner = getattr(item, "cls", None)
    if not FORCE or owner is None:
        return
    classes = list(getattr(owner, "all_model_classes", None) or ())
    tester = getattr(owner, "model_tester_class", None) or object
    classes += [value for value in vars(tester).values() if isinstance(value, type)]
    for cls in classes:
        for base in cls.__mro__:
            if base.__name__.endswith("PreTrainedModel") and base.__name__ != "PreTrainedModel":
                base._supports_sdpa = True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One JSON line per finished test: the worst of its phases."""
    if report.when == "call" or (report.when == "setup" and not report.passed) or report.failed:
        outcome = report.outcome if report.when == "call" or report.skipped else "error"
        why = ""
        if report.failed:
            why = report.longreprtext.strip().splitlines()[-1][:300]
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:
                why = f"{crash.message.splitlines()[0][:300]} ({os.path.basename(crash.path)}:{crash.lineno})"
        elif report.skipped and isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2])[:200]
        line = {
            "test": report.nodeid.split("::", 1)[1], "outcome": outcome, "seconds": round(report.duration, 3),
            "calls": _calls - _calls_at_start, "why": why,
        }  # fmt: skip
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
