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
from adaattn_hf.calibration.inputs import OutOfTime, Run
from adaattn_hf.eval.arms import exact_tap

from ..support.models import fresh_pair, tokens


def bench(model: Any, length: int, batch: int = 1, rounds: int = 2, steps: bool = False, **more: Any) -> Any:
    ids = tokens(1, length)
    sample = SimpleNamespace(joint=[None])
    settings = SimpleNamespace(**{"batch": batch, "rounds": rounds, "aim": "prompt", "captured": False} | more)
    return SimpleNamespace(
        arms=SimpleNamespace(model=model, tokens=lambda _: ids), samples={length: sample}, pace=None,
        windows=lambda _: [None], settings=settings, run=Run(), refuse_late=lambda together, seconds: None,
        scoring=SimpleNamespace(generates=steps),
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
        monkeypatch.setattr(
            benefit, "signature", lambda _: SimpleNamespace(parameters=dict.fromkeys(("use_cache", "past_key_values")))
        )
        monkeypatch.setattr("adaattn_hf.stats.stopwatch.time.process_time", lambda: now[0])

    return install


def test_the_ratio_is_that_of_the_times_and_the_first_round_warms_up(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [9.0, 2.0, 2.0], "plan": [90.0, 1.0, 1.0]})
    (found,) = benefit.whole_passes(bench(model, 12), {})
    assert (found.length, found.rounds, found.clock) == (12, 2, "CPU time")
    assert found.ratio == found.low == found.high == 2.0
    assert found.sentence() == (
        "whole forward pass of 12 tokens: 2.00 times as fast as exact (95 %: 2.00 to 2.00, CPU time, 2 rounds)"
    )


def test_a_plan_that_slows_whole_passes_is_said_to(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [1.0], "plan": [1.5]})
    (found,) = benefit.whole_passes(bench(model, 12), {})
    assert "slower: leave the plan out here" in found.sentence()


def test_passes_of_several_sequences_say_so(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [2.0], "plan": [1.0]})
    slow, seen = model.forward, []

    def watched(**given: Any) -> Any:
        seen.append(given["input_ids"].shape)
        return slow(**given)

    model.forward = watched
    (found,) = benefit.whole_passes(bench(model, 12, batch=3), {})
    assert set(seen) == {(3, 12)}
    assert found.sentence().startswith("whole forward pass of 3 times 12 tokens: 2.00 times as fast")


def test_the_interval_is_students_of_the_logarithms(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [1.0, 2.0, 2.0, 2.0], "plan": [1.0, 1.0, 2.0, 4.0]})
    (found,) = benefit.whole_passes(bench(model, 12, rounds=3), {})
    logs = torch.tensor([math.log(2.0), 0.0, -math.log(2.0)], dtype=torch.float64)
    spread = 4.302653 * float(logs.std()) / math.sqrt(3)  # Student's t with 2 degrees of freedom, 97.5 %
    assert found.ratio == pytest.approx(1.0)
    assert found.low == pytest.approx(math.exp(-spread), rel=1e-5)
    assert found.high == pytest.approx(math.exp(spread), rel=1e-5)


def test_short_passes_get_more_rounds_than_were_asked_for(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [0.01], "plan": [0.01]})
    assert next(benefit.whole_passes(bench(model, 12), {})).rounds == benefit.MOST_ROUNDS


def test_steps_are_timed_behind_the_prompt_by_the_rows_that_are_served(clock: Any) -> None:
    """Each behind all of the prompt but its last token, so that it sees as many keys as the plan speaks of."""
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [3.0], "plan": [2.0]})
    slow, seen = model.forward, []

    def watched(**given: Any) -> Any:
        past = given.get("past_key_values")
        seen.append((*given["input_ids"].shape, 0 if past is None else past.get_seq_length()))
        return slow(**given)

    model.forward = watched
    found = list(benefit.whole_passes(bench(model, 12, batch=3, steps=True, aim="step"), {}))
    assert [(one.step, one.batch, one.aimed) for one in found] == [(False, 1, False), (True, 1, False), (True, 3, True)]
    assert set(seen) == {(1, 12, 0), (1, 11, 0), (1, 1, 11), (3, 1, 11)}
    assert found[2].sentence().startswith("whole decode step of three rows behind 12 tokens: 1.50 times as fast")
    assert [one.words() for one in found] == [
        "a prompt of 12 1.50", "a step of one row behind 12 1.50", "a step of three rows behind 12 1.50",
    ]  # fmt: skip
    assert (
        benefit.Benefit(32768, 1.01, 0.98, 1.04, 4, "time", step=True).words() == "a step of one row behind 32k nothing"
    )
    captured = bench(model, 12, steps=True, captured=True)
    assert [one.step for one in benefit.whole_passes(captured, {})] == [False]


def test_passes_that_the_minutes_have_no_room_for_are_not_begun(clock: Any) -> None:
    model = fresh_pair("llama").ours.eval()
    clock(model, {"exact": [3.0], "plan": [2.0]})
    late, asked = bench(model, 12, steps=True), list[float]()

    def refuse(together: bool, seconds: float) -> None:
        asked.append(seconds)
        if len(asked) == 3:  # before the first step
            raise OutOfTime("1 minutes are over")

    late.refuse_late, found = refuse, list[benefit.Benefit]()
    with pytest.raises(OutOfTime):
        found.extend(benefit.whole_passes(late, {}))
    assert [one.step for one in found] == [False], "what was timed before stays"
