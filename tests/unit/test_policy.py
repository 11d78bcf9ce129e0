"""Risks, prices, the knapsack and the acceptance test against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.plan import EXACT, Choice
from adaattn_hf.policy.acceptance import Gates, clustered, upper_bound
from adaattn_hf.policy.backoff import Backoff, adjusted_alpha
from adaattn_hf.policy.candidates import candidates
from adaattn_hf.policy.decisive import decisive_pairs
from adaattn_hf.policy.knapsack import Launches, allocate, evaluate, shared_prices
from adaattn_hf.policy.prices import Price, PriceTable, fit_price
from adaattn_hf.policy.risk import RiskTable, corrected, rescale


def _problem(seed: int, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Launches]:
    random = np.random.default_rng(seed)
    prices = np.sort(random.uniform(0.1, 1.0, (4, 3)), axis=1)[:, ::-1].copy()
    risks = random.exponential(1e-4, (bins, 4, 3))
    risks[:, :, 0] = 0.0
    budget = random.uniform(0.5e-4, 5e-4, bins)
    launches = Launches(np.array([0, 0, 1, 1]), np.array([0, 1, 1]), random.uniform(0.0, 0.4, 2))
    return prices, risks, budget, launches


@given(seed=st.integers(0, 10_000), bins=st.sampled_from([1, 2]), fixed=st.booleans())
@settings(deadline=None, max_examples=40)
def test_knapsack_is_optimal_against_enumeration(seed: int, bins: int, fixed: bool) -> None:
    prices, risks, budget, launches = _problem(seed, bins)
    costs = launches if fixed else None
    found = allocate(prices, risks, budget, costs, gap=0.0)
    assert (found.risk <= budget).all()
    every = (evaluate(np.array(p), prices, risks, costs) for p in itertools.product(range(3), repeat=4))
    best = min(a.price for a in every if (a.risk <= budget).all())
    assert found.price == pytest.approx(best, rel=1e-6)


def test_enumeration_would_notice_a_worse_answer() -> None:
    prices, risks, _, launches = _problem(0, 1)
    found = allocate(prices, risks, np.array([1.0]), launches, gap=0.0)
    assert found.picks.any()
    assert evaluate(np.zeros(4, dtype=np.int64), prices, risks, launches).price > found.price
    assert allocate(prices, risks, np.zeros(1), launches).picks.tolist() == [0, 0, 0, 0]


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=15)
def test_more_budget_never_costs_more(seed: int) -> None:
    prices, risks, budget, launches = _problem(seed, 1)
    costs = [
        allocate(prices, risks, budget * factor, launches, gap=0.0).price for factor in (0.0, 0.5, 1.0, 4.0)
    ]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(costs))


def test_knapsack_forbids_infinite_risk_and_needs_a_riskless_choice() -> None:
    prices, risks, budget, _ = _problem(1, 1)
    risks[:, :, 1:] = np.inf
    assert allocate(prices, risks, budget * 1e9).picks.tolist() == [0, 0, 0, 0]
    risks[:, 2, 0] = 1e-3
    with pytest.raises(ValueError, match="zero risk"):
        allocate(prices, risks, budget)
    with pytest.raises(ValueError, match="shape"):
        allocate(prices, risks[:, :3], budget)


def test_risk_table_means_and_refusals() -> None:
    table = RiskTable(2, 3)
    with pytest.raises(ValueError, match="empty"):
        table.mean()
    table.add(np.full((2, 3), 4.0), 2)
    table.add(np.full((2, 3), 2.0), 2)
    assert table.mean().tolist() == [[1.5] * 3] * 2
    assert table.standard_error()[0, 0] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="non-finite"):
        table.add(np.full((2, 3), np.nan), 1)
    assert rescale(1.0, 2e-4, 3e-4) == pytest.approx(1.5)
    assert rescale(1.3, 0.0, 3e-4) == 1.3


def test_price_lines_interpolate_and_round_trip() -> None:
    line = fit_price([1, 3], [3.0, 7.0])
    assert (line.constant, line.slope) == (1.0, 2.0)
    assert line.seconds(0) == 0.0
    assert fit_price([1, 3], [1.0, 9.0]).constant == 0.0
    table = PriceTable(
        "m", True, {"prefill": {1000: {"exact": Price(0.0, 1.0)}, 4000: {"exact": Price(0.0, 16.0)}}}
    )
    assert table.price("prefill", 2000, "exact").slope == pytest.approx(4.0)
    assert table.price("prefill", 8000, "exact").slope == pytest.approx(64.0)
    assert PriceTable.from_json(table.to_json()).to_json() == table.to_json()
    with pytest.raises(KeyError, match="no prefill price"):
        table.price("prefill", 1000, "w64")
    with pytest.raises(ValueError, match="prices file"):
        PriceTable.from_json("{}")


def test_candidates_cross_kinds_with_precisions() -> None:
    found = candidates(4096, 64, "float32")
    assert found.choices[0] == EXACT
    assert len(set(found.choices)) == len(found.choices)
    for choice, row in zip(found.choices, found.combine, strict=True):
        parts = [part for part, used in zip(found.parts, row, strict=True) if used]
        assert len(parts) == (choice.kind != "exact") + (choice.precision != "model") + (choice.rank > 0)
    assert not any(choice.precision == "bf16" for choice in candidates(4096, 64, "bfloat16").choices)
    assert max(c.window for c in candidates(1024, 64, "float32").choices) == 256
    assert candidates(4096, 64, "float32", ("rank",)).choices == (EXACT, Choice(rank=32), Choice(rank=48))
    with pytest.raises(ValueError, match="did you mean 'window'"):
        candidates(4096, 64, "float32", ("windows",))


def test_backoff_spends_less_and_demotes_the_worst() -> None:
    state = Backoff(limit=2).failed(np.array([0.0, 3.0, 1.0, 2.0, 0.5]))
    assert state.demoted == (1, 2, 3)
    assert state.share == pytest.approx(0.42)
    assert not state.exhausted
    assert state.failed(np.zeros(5)).exhausted
    assert adjusted_alpha(0.05, 5) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="alpha"):
        adjusted_alpha(0.0, 1)


def test_bound_covers_the_truth_at_its_level() -> None:
    random = np.random.default_rng(0)
    tokens = np.full(12, 100)
    covered = [upper_bound(random.normal(0.3, 1.0, 12) * 100, tokens, 0.95).upper >= 0.3 for _ in range(2000)]
    assert 0.935 < float(np.mean(covered)) < 0.965
    assert upper_bound(np.array([1.0]), np.array([10]), 0.95).upper == math.inf


def test_clusters_are_documents_where_there_are_enough() -> None:
    sums, tokens = clustered(["a", "b"] * 8, [1.0] * 16, [10] * 16)
    assert len(sums) == 16
    sums, tokens = clustered([str(i % 8) for i in range(16)], [1.0] * 16, [10] * 16)
    assert sums.tolist() == [2.0] * 8
    assert tokens.tolist() == [20] * 8


@pytest.mark.parametrize(
    ("change", "word"),
    [({}, ""), ({"upper": 2e-3}, "upper bound"), ({"kl": 2e-3}, "KL"), ({"top1": 0.9}, "agrees"), ({"lost": 2}, "lost"),
     ({"upper": math.nan}, "upper bound")],
)  # fmt: skip
def test_each_gate_can_fail(change: dict[str, float], word: str) -> None:
    values = {"upper": 5e-4, "kl": 5e-4, "top1": 0.995, "lost": 0, "found": 30}
    reasons = Gates.for_budget(1e-3).failures(**{**values, **change})  # type: ignore[arg-type]
    assert (len(reasons) == 1 and word in reasons[0]) if change else reasons == ()


def test_units_of_a_launch_share_its_fixed_cost() -> None:
    """Shares add up to the price of the whole."""
    rng = np.random.default_rng(3)
    prices = rng.random((6, 3))
    launches = Launches(np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 1]), np.array([0.5, 0.25]))
    for _ in range(20):
        picks = rng.integers(0, 3, 6)
        shares = shared_prices(picks, prices, launches)
        assert shares.sum() == pytest.approx(evaluate(picks, prices, np.zeros((1, 6, 3)), launches).price)
    shares = shared_prices(np.array([0, 1, 2, 0, 0, 0]), np.zeros((6, 3)), launches)
    assert shares.tolist() == pytest.approx([0.5, 0.125, 0.125, *[0.5 / 3] * 3])


def test_decisive_pairs_are_the_largest_inside_and_the_best_outside() -> None:
    prices = np.array([[1.0, 0.5, 0.2]] * 4)
    risks = np.array([[[0.0, 4.0, 9.0], [0.0, 1.0, 1.5], [0.0, 2.0, 90.0], [0.0, 3.0, 5.0]]]) * 1e-5
    picks = np.array([1, 1, 1, 0])
    budget = np.array([1e-4])
    saved = {(0, 2): 0.3 / 5, (1, 2): 0.3 / 0.5, (2, 2): 0.3 / 88, (3, 1): 0.5 / 3, (3, 2): 0.8 / 5}
    best = {
        unit: max((rate, pair) for pair, rate in saved.items() if pair[0] == unit)[1] for unit in range(4)
    }
    outside = sorted(best.values(), key=lambda pair: -saved[pair])
    assert outside[:2] == [(1, 2), (3, 1)]
    assert decisive_pairs(picks, prices, risks, budget, 4) == sorted([(0, 1), (2, 1), *outside[:2]])
    assert decisive_pairs(picks, prices, risks, budget, 1) == [(0, 1)]
    assert len(decisive_pairs(picks, prices, risks, budget, 100)) == 3 + 4
    assert decisive_pairs(np.zeros(4, dtype=np.int64), prices, risks, budget, 2) == [(1, 2), (2, 1)]
    assert decisive_pairs(picks, prices, risks, budget, 0) == []


def test_a_wrong_estimate_gives_way_to_what_was_measured() -> None:
    """Seven estimates agree with the measurement but for noise; the eighth is fifty times too small."""
    random = np.random.default_rng(0)
    true = random.uniform(1e-6, 1e-4, 8)
    direct = true * np.exp(0.1 * random.standard_normal(8))
    fisher = true * np.exp(0.1 * random.standard_normal(8))
    fisher[3] /= 50
    errors = 0.1 * fisher, 0.1 * direct
    found, common = corrected(fisher, errors[0], direct, errors[1])
    assert abs(math.log(found[3] / true[3])) < 0.3
    assert abs(math.log(common)) < 0.2
    assert np.abs(np.log(found / true)).max() < 0.4
    assert (np.minimum(fisher, direct) * 0.8 <= found).all()
    assert (found <= np.maximum(fisher, direct) * 1.25).all()


def test_both_estimates_count_by_their_errors() -> None:
    fisher, direct = np.array([1.0, 1.0, 1.0]), np.array([0.5, 1.0, 2.0])
    sure, unsure = np.full(3, 1e-3), np.full(3, 10.0)
    assert corrected(fisher, unsure, direct, sure)[0] == pytest.approx(direct, rel=0.01)
    assert corrected(fisher, sure, direct, unsure)[0] == pytest.approx(fisher, rel=0.01)
    assert corrected(fisher, np.full(3, np.inf), direct, unsure)[0] == pytest.approx(direct)
    one, factor = corrected(
        np.array([0.0, 2.0]), np.array([0.0, 0.2]), np.array([1e-9, 4.0]), np.full(2, 0.1)
    )
    assert one == pytest.approx([0.0, 4.0])
    assert factor == pytest.approx(2.0)
    assert corrected(np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2))[1] == 1.0
