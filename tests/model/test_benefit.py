"""What a plan buys of whole passes: the ratio of times taken in turn, with an interval that covers it."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from adaattn_hf.attention.listeners import tapping
from adaattn_hf.calibration import passes as benefit
from adaattn_hf.calibration.inputs import OutOfTime, Run
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.arms import exact_tap

from ..support.models import fresh_pair, tokens


def bench(model: Any, length: int, *, steps: bool = False, **settings: Any) -> Any:
    ids, sample = tokens(1, length), {"joint": [None]}
    asked = CalibrationSettings(**{"rounds": 2} | settings)
    return SimpleNamespace(
        arms=SimpleNamespace(model=model, tokens=lambda _: ids), samples={length: sample},
        windows=lambda _: [None], settings=asked, run=Run(), refuse_late=lambda together, seconds: None,
        pace={"pair": {length: 7.0}}, scoring=SimpleNamespace(generates=steps),
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A model whose passes take the seconds that are said, arm by arm, and time stands still beside them."""

    def install(exact: list[float], plan: list[float]) -> Any:
        model: Any = fresh_pair("llama").ours.eval()
        now, turns, forward = [0.0], [itertools.cycle(one) for one in (plan, exact)], model.forward

        def slow(*args: Any, **kwargs: Any) -> Any:
            now[0] += next(turns[tapped.call_args.args[0] is exact_tap])
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", slow)
        tapped = Mock(side_effect=tapping)
        monkeypatch.setattr(benefit, "tapping", tapped)
        known = SimpleNamespace(parameters=dict.fromkeys(("use_cache", "past_key_values")))
        monkeypatch.setattr(benefit, "signature", lambda _: known)
        monkeypatch.setattr("adaattn_hf.stats.stopwatch.time.process_time", lambda: now[0])
        return model

    return install


def test_the_ratio_is_that_of_the_times_and_the_first_round_warms_up(clock: Any) -> None:
    (found,) = benefit.whole_passes(bench(clock([9.0, 2.0, 2.0], [90.0, 1.0, 1.0]), 12), {})
    assert (found.length, found.rounds, found.clock) == (12, 2, "CPU time")
    assert found.ratio == found.low == found.high == 2.0
    assert found.words() == "a prompt of 12 2.00"


def test_a_plan_that_slows_whole_passes_is_said_to(clock: Any) -> None:
    (found,) = benefit.whole_passes(bench(clock([1.0], [1.5]), 12), {})
    assert found.words() == "a prompt of 12 0.67 (slower: leave the plan out there)"


def test_the_interval_is_students_of_the_logarithms(clock: Any) -> None:
    (found,) = benefit.whole_passes(bench(clock([1.0, 2.0, 2.0, 2.0], [1.0, 1.0, 2.0, 4.0]), 12, rounds=3), {})
    logs = torch.tensor([math.log(2.0), 0.0, -math.log(2.0)], dtype=torch.float64)
    spread = 4.302653 * float(logs.std()) / math.sqrt(3)  # Student's t with 2 degrees of freedom, 97.5 %
    assert found.ratio == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((math.exp(-spread), math.exp(spread)), rel=1e-5)
    assert found.words() == "a prompt of 12 nothing"


def test_short_passes_get_more_rounds_than_were_asked_for(clock: Any) -> None:
    assert next(benefit.whole_passes(bench(clock([0.01], [0.01]), 12), {})).rounds == benefit.MOST_ROUNDS


def test_prompts_and_steps_behind_them_are_timed_by_the_rows_that_are_served(clock: Any) -> None:
    """A step is behind all of a prompt but its last token, so that it sees as many keys as the plan speaks of."""
    model, seen = clock([3.0], [2.0]), []
    slow = model.forward

    def watched(**given: Any) -> Any:
        past = given.get("past_key_values")
        seen.append((*given["input_ids"].shape, 0 if past is None else past.get_seq_length()))
        return slow(**given)

    model.forward = watched
    found = list(benefit.whole_passes(bench(model, 12, batch=3, steps=True, aim="step"), {}))
    assert [(one.step, one.batch, one.aimed) for one in found] == [(False, 1, False), (True, 1, False), (True, 3, True)]
    assert set(seen) == {(1, 12, 0), (1, 11, 0), (1, 1, 11), (3, 1, 11)}
    assert found[2].words() == "a step of three rows behind 12 1.50"
    (prompts,) = benefit.whole_passes(bench(model, 12, batch=3, steps=True, captured=True), {})
    assert (prompts.words(), prompts.aimed, seen[-1]) == ("three prompts of 12 1.50", True, (3, 12, 0))


def test_passes_that_the_minutes_have_no_room_for_are_not_begun(clock: Any) -> None:
    late, found = bench(clock([3.0], [2.0]), 12, steps=True), list[benefit.Benefit]()
    late.refuse_late = Mock(side_effect=[None, None, OutOfTime("1 minutes are over")])
    with pytest.raises(OutOfTime):
        found.extend(benefit.whole_passes(late, {}))
    assert [one.step for one in found] == [False], "what was timed before stays"
    assert late.refuse_late.call_args_list[0].kwargs["seconds"] == 7.0, "both passes, as they were foretold"
