"""The statistics of a comparison, against simulation, closed forms and scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from adaattn_hf.eval import summary as compare


def test_with_equal_documents_the_interval_is_student_s() -> None:
    rng = np.random.default_rng(0)
    means = rng.normal(0.01, 0.1, 20)
    found = compare.paired_difference(means * 50, np.full(20, 50))
    test = stats.ttest_1samp(means, 0.0)
    interval = test.confidence_interval(0.95)
    assert found["mean"] == pytest.approx(means.mean())
    assert (found["low"], found["high"]) == pytest.approx((interval.low, interval.high))
    assert found["upper"] == pytest.approx(
        stats.ttest_1samp(means, 0.0, alternative="less").confidence_interval(0.95).high
    )


def test_intervals_cover_the_truth_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RESAMPLES", 2)  # those of the bootstrap are compared with these below
    rng = np.random.default_rng(1)
    inside = below = 0
    runs = 400
    for _ in range(runs):
        tokens = rng.integers(20, 200, 25)
        shift = rng.normal(0.0, 0.05, 25)  # documents differ: tokens within one are not independent
        delta = tokens * (0.02 + shift) + rng.normal(0, 0.3, 25) * np.sqrt(tokens)
        found = compare.paired_difference(delta, tokens)
        inside += found["low"] <= 0.02 <= found["high"]
        below += found["upper"] >= 0.02
    assert 0.90 <= inside / runs <= 0.985
    assert 0.90 <= below / runs <= 0.985


def test_the_bootstrap_agrees_where_there_are_many_documents() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(50, 150, 200)
    delta = tokens * rng.normal(0.0, 0.05, 200)
    found = compare.paired_difference(delta, tokens)
    width = found["high"] - found["low"]
    assert found["bootstrap_low"] == pytest.approx(found["low"], abs=0.1 * width)
    assert found["bootstrap_high"] == pytest.approx(found["high"], abs=0.1 * width)
    assert found["bootstrap_upper"] == pytest.approx(found["upper"], abs=0.1 * width)
    assert found == compare.paired_difference(delta, tokens)  # the seed is fixed


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8))
def test_no_difference_is_exactly_none(tokens: list[int]) -> None:
    found = compare.paired_difference(np.zeros(len(tokens)), np.asarray(tokens))
    limits = ("mean", "standard_error", "low", "high", "upper", "bootstrap_low", "bootstrap_high", "bootstrap_upper")
    assert [found[key] for key in limits] == [0.0] * len(limits)


def test_one_document_gives_a_mean_and_no_interval() -> None:
    found = compare.paired_difference(np.array([3.0]), np.array([30]))
    assert found["mean"] == pytest.approx(0.1)
    assert found["low"] is None
    assert found["upper"] is None


def test_flips_are_mcnemar_s() -> None:
    stock = np.array([True] * 8 + [False] * 4 + [True] * 2)
    arm = np.array([True] * 8 + [True] + [False] * 3 + [False] * 2)
    found = compare.flips(stock, arm)
    assert (found["lost"], found["won"]) == (2, 1)
    assert found["mcnemar_p"] == pytest.approx(stats.binomtest(2, 3).pvalue)
    assert (found["accuracy_stock"], found["accuracy"]) == (10 / 14, 9 / 14)
    assert compare.flips(stock, stock)["mcnemar_p"] == 1.0


def test_divergence_reports_the_tail() -> None:
    kl = np.zeros(10_000)
    kl[:20] = 1.0
    found = compare.divergence(kl, kl == 0)
    assert found["kl_mean"] == pytest.approx(0.002)
    assert (found["kl_p999"], found["kl_max"]) == (1.0, 1.0)
    assert found["top1_agreement"] == pytest.approx(0.998)


def test_groups() -> None:
    groups = np.array([4, 2, 4, 9])
    assert compare.group_sums(np.array([1.0, 2.0, 3.0, 5.0]), groups).tolist() == [2.0, 4.0, 5.0]
    assert compare.group_all(np.array([True, True, False, True]), groups).tolist() == [True, False, True]
    assert math.isclose(compare.group_sums(np.ones(4), groups).sum(), 4)
