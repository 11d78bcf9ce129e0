"""Windows: every token once, the stated context, and the same windows as the tools that people already use."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from adaattn_hf.errors import UsageError
from adaattn_hf.eval import windows
from adaattn_hf.eval.windows import TokenWindow

LENGTHS = st.integers(0, 70)
CONTEXTS = st.integers(2, 20)
PREFIX = -1


def tokens_of(length: int) -> list[int]:
    """Distinct tokens, so that a window's contents tell where they came from."""
    return list(range(100, 100 + length))


def scored(made: Iterable[TokenWindow]) -> list[int]:
    return [int(t) for w in made for t in w.targets]


def assert_predicts_next(window: TokenWindow) -> None:
    for position, target in zip(window.positions, window.targets, strict=True):
        if position + 1 < len(window.input_ids):
            assert window.input_ids[position + 1] == target


@given(LENGTHS, CONTEXTS, st.data())
def test_rolling_scores_every_token_once_in_order(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    made = list(windows.rolling(tokens_of(length), context, stride, PREFIX))
    assert scored(made) == tokens_of(length)
    for index, window in enumerate(made):
        assert len(window.input_ids) <= context
        assert_predicts_next(window)
        if index:  # later windows are filled up with context
            assert len(window.input_ids) == context
            assert window.positions[0] >= context - stride


@given(st.integers(1, 70), CONTEXTS, st.data())
def test_rolling_is_lm_evaluation_harness_s(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    theirs = get_rolling_token_windows(tokens_of(length), PREFIX, context, context - stride + 1)
    made = list(windows.rolling(tokens_of(length), context, stride, PREFIX))
    for window, (inputs, predicted) in zip(made, theirs, strict=True):
        assert list(window.targets) == predicted
        assert list(window.input_ids) == inputs
    if stride == context:  # what loglikelihood_rolling makes of them is the same input
        pairs = get_rolling_token_windows(tokens_of(length), PREFIX, context, 1)
        for window, pair in zip(made, map(make_disjoint_window, pairs), strict=True):
            head, continuation = pair
            assert list(window.input_ids) == (head + continuation)[:-1]


@given(LENGTHS, CONTEXTS, st.data())
def test_strided_scores_every_token_but_those_without_a_predecessor(
    length: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    made = list(windows.strided(tokens_of(length), context, stride))
    first_of_windows = tokens_of(length)[::stride] if stride == context else tokens_of(length)[:1]
    assert scored(made) == [t for t in tokens_of(length) if t not in first_of_windows]
    for window in made:
        assert len(window.input_ids) < context
        assert_predicts_next(window)


@given(st.integers(1, 40), st.integers(4, 12), st.floats(0.05, 1))
def test_masked_hides_one_token_at_a_time(length: int, context: int, fraction: float) -> None:
    mask, first, last = -7, [1], [2]
    made = list(windows.masked(tokens_of(length), context, mask, first, last, fraction=fraction))
    if fraction == 1:
        assert scored(made) == tokens_of(length)
    assert len(set(scored(made))) == len(made)  # none twice
    for window in made:
        assert len(window.input_ids) <= context
        assert list(np.flatnonzero(window.input_ids == mask)) == list(window.positions)
        assert (window.input_ids[0], window.input_ids[-1]) == (1, 2)


def test_masked_sample_is_the_stated_share_and_the_same_again() -> None:
    def sample(seed: int) -> list[int]:
        return scored(windows.masked(tokens_of(400), 102, -7, [1], [2], fraction=0.25, seed=seed))

    assert len(sample(0)) == 100
    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


def test_continuation_keeps_the_end_of_a_long_prompt() -> None:
    window = windows.continuation(tokens_of(10), [7, 8], context=5)
    assert list(window.input_ids) == [106, 107, 108, 109, 7]
    assert list(window.positions) == [3, 4]
    assert list(window.targets) == [7, 8]


@pytest.mark.parametrize(
    ("context", "stride", "says"),
    [(1, 1, "at least 2"), (8, 9, "leave tokens out"), (8, 0, "expected 1 to the context")],
)
def test_what_does_not_fit_is_refused(context: int, stride: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        windows.check(context, stride)


def test_a_last_word_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="at least the 4 tokens"):
        windows.continuation([1], [1, 2, 3, 4], 3)
