"""What a plan buys of whole passes: the ratio of times taken in turn, with an interval that covers it."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaattn_hf.attention.listeners import Answers, listeners
from adaattn_hf.calibration import passes as benefit
from adaattn_hf.calibration.inputs import Run
from adaattn_hf.eval.arms import exact_tap

from ..support.models import fresh_pair, tokens


def bench(model: Any, length: int, batch: int = 1) -> Any:
    ids = tokens(1, length)
    sample = SimpleNamespace(joint=[None])
    settings = SimpleNamespace(batch=batch)
    return SimpleNamespace(
        arms=SimpleNamespace(model=model, tokens=lambda _: ids), samples={length: sample},
        windows=lambda _: [None], settings=settings, run=Run(), refuse_late=lambda together: None,
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, dict[str, list[float]]], None]:
    """Makes a model whose passes take the seconds that are said, arm by arm, and time stand still beside them."""

    def install(model: Any, seconds: dict[str, list[float]]) -> None:
        now = [0.0]
        turns = {name: itertools.cycle(values) for name, values in seconds.items()}
        forward = model.forward

        def slow(*args: Any, **kwargs: Any) -> Any:
            (*_, heard) = listeners()
            assert isinstance(heard, Answers)
            now[0] += next(turns["exact" if heard.function is exact_tap else "plan"])
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", slow)
        monkeypatch.setattr(benefit, "signature", lambda _: SimpleNamespace(parameters={"use_cache": None}))
        monkeypatch.setattr("adaattn_hf.stats.stopwatch.time.process_time", lambda: now[0])

    return install


def test_the_ratio_is_that_of_the_times_and_the_first_round_warms_up(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [9.0, 2.0, 2.0], "plan": [90.0, 1.0, 1.0]})
    (found,) = benefit.whole_forward(bench(model, 12), {}, 2)
    assert (found.length, found.rounds, found.clock) == (12, 2, "CPU time")
    assert found.ratio == found.low == found.high == 2.0
    assert found.sentence() == (
        "whole forward pass of 12 tokens: 2.00 times as fast as exact (95 %: 2.00 to 2.00, CPU time, 2 rounds)"
    )


def test_a_plan_that_slows_whole_passes_is_said_to(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [1.0], "plan": [1.5]})
    (found,) = benefit.whole_forward(bench(model, 12), {}, 2)
    assert "slower: leave the plan out here" in found.sentence()


def test_passes_of_several_sequences_say_so(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [2.0], "plan": [1.0]})
    slow, seen = model.forward, []

    def watched(**given: Any) -> Any:
        seen.append(given["input_ids"].shape)
        return slow(**given)

    model.forward = watched
    (found,) = benefit.whole_forward(bench(model, 12, batch=3), {}, 2)
    assert set(seen) == {(3, 12)}
    assert found.sentence().startswith("whole forward pass of 3 times 12 tokens: 2.00 times as fast")


def test_the_interval_is_students_of_the_logarithms(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [1.0, 2.0, 2.0, 2.0], "plan": [1.0, 1.0, 2.0, 4.0]})
    (found,) = benefit.whole_forward(bench(model, 12), {}, 3)
    logs = torch.tensor([math.log(2.0), 0.0, -math.log(2.0)], dtype=torch.float64)
    spread = 4.302653 * float(logs.std()) / math.sqrt(3)  # Student's t with 2 degrees of freedom, 97.5 %
    assert found.ratio == pytest.approx(1.0)
    assert found.low == pytest.approx(math.exp(-spread), rel=1e-5)
    assert found.high == pytest.approx(math.exp(spread), rel=1e-5)


def test_short_passes_get_more_rounds_than_were_asked_for(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [0.01], "plan": [0.01]})
    assert benefit.whole_forward(bench(model, 12), {}, 2)[0].rounds == benefit.MOST_ROUNDS
