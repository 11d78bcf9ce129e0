"""Risks, prices, the knapsack and the acceptance test against brute force."""

import ctypes
import itertools
import json
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from adaattn_hf.calibration.search import REHEARSED
from adaattn_hf.calibration.state import CalibrationState
from adaattn_hf.plans.choices import EXACT, Setting
from adaattn_hf.plans.choices.window import WINDOWS
from adaattn_hf.plans.limits import Gates
from adaattn_hf.policy import knapsack
from adaattn_hf.policy.candidates import FAMILIES, Candidates, candidates, offered
from adaattn_hf.policy.knapsack import Launches, allocate, evaluate, of_units, shared_prices, worst_length
from adaattn_hf.policy.prices import Price, PriceTable
from adaattn_hf.policy.silence import silenced
from adaattn_hf.stats.paired import clustered, clustered_ratio

from ..support.choices import make_choice, precision_of


def _problem(seed: int, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Launches]:
    random = np.random.default_rng(seed)
    prices = np.sort(random.uniform(0.1, 1.0, (4, 3)), axis=1)[:, ::-1].copy()
    risks = random.exponential(1e-4, (bins, 4, 3))
    risks[:, :, 0] = 0.0
    budget = random.uniform(0.5e-4, 5e-4, bins)
    launches = Launches(np.array([0, 0, 1, 1]), np.array([0, 1, 1]), random.uniform(0.0, 0.4, (2, 4, 3)))
    return prices, risks, budget, launches


def _launches(layer: Sequence[int], launch: Sequence[int], constant: Sequence[float]) -> Launches:
    """Launches of one call, whose constants are those of every layer."""
    return Launches(np.array(layer), np.array(launch), np.tile(np.array(constant, dtype=float), (1, len(layer), 1)))


def _cheapest(prices: np.ndarray, risks: np.ndarray, budget: np.ndarray, costs: Launches) -> float:
    """By enumeration."""
    every = (evaluate(np.array(p), prices, risks, costs) for p in itertools.product(range(3), repeat=4))
    return min(a.price for a in every if (a.risk <= budget).all())


@given(seed=st.integers(0, 10_000), bins=st.sampled_from([1, 2]), fixed=st.booleans())
@settings(deadline=None, max_examples=40)
def test_knapsack_is_optimal_against_enumeration(seed: int, bins: int, fixed: bool) -> None:
    prices, risks, budget, launches = _problem(seed, bins)
    costs = launches if fixed else Launches.free(4, 3)
    found = allocate(prices, risks, budget, costs, gap=0.0)
    assert (found.risk <= budget).all()
    assert found.price == pytest.approx(_cheapest(prices, risks, budget, costs), rel=1e-6)


def test_enumeration_would_notice_a_worse_answer() -> None:
    prices, risks, _, launches = _problem(0, 1)
    found = allocate(prices, risks, np.array([1.0]), launches, gap=0.0)
    assert found.picks.any()
    assert evaluate(np.zeros(4, dtype=np.int64), prices, risks, launches).price > found.price
    for budget in (0.0, 1e-26):
        assert allocate(prices, risks, np.array([budget]), launches).picks.tolist() == [0, 0, 0, 0]


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=15)
def test_more_budget_never_costs_more(seed: int) -> None:
    prices, risks, budget, launches = _problem(seed, 1)
    costs = [allocate(prices, risks, budget * factor, launches, gap=0.0).price for factor in (0.0, 0.5, 1.0, 4.0)]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(costs))


def _cheapest_by_length(random: np.random.Generator, rises: bool) -> list[float]:
    """Prices of the cheapest plans inside one budget at rising lengths, by lines measured at three of them."""
    measured, names = (512, 2048, 8192), ("exact", "window", "rounded")
    lines = np.sort(random.uniform(0.0, 1.0, (3, len(names), 2)), axis=0)[:: 1 if rises else -1]
    lines[:, :, 0] *= random.integers(0, 2, len(names))  # some launches have no constant
    rows = [{name: Price(*own) for name, own in zip(names, line, strict=True)} for line in lines]
    table = PriceTable("m", {}, {"prefill": dict(zip(measured, rows, strict=True))})
    risks = random.exponential(1e-4, (1, 4, len(names)))
    risks[:, :, 0] = 0.0
    found = []
    for length in (256, 512, 700, 2048, 5000, 8192, 32768):
        prices, launches = of_units(table, {("prefill", length): 1.0}, [names] * 4, names, [0, 0, 1, 1])
        found.append(allocate(prices, risks, np.array([2e-4]), launches, gap=0.0).price)
    return found


@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=25)
def test_a_longer_sequence_has_no_cheaper_plan(seed: int) -> None:
    """Where no launch is faster on more tokens; prices that fall with the length would show."""
    costs = _cheapest_by_length(np.random.default_rng(seed), rises=True)
    assert all(b >= a * (1 - 1e-6) for a, b in itertools.pairwise(costs))
    falling = _cheapest_by_length(np.random.default_rng(0), rises=False)
    assert falling[-1] < falling[0]


def test_risks_of_a_plan_are_those_of_its_worst_length() -> None:
    risks = np.array([[[0.0, 1.0], [0.0, 5.0]], [[0.0, 4.0], [0.0, 3.0]]])
    picks = np.array([1, 1])
    assert worst_length(risks, picks).tolist() == [4.0, 3.0]
    assert worst_length(risks, picks).sum() == evaluate(picks, np.ones((2, 2)), risks, Launches.free(2, 2)).risk.max()


def test_knapsack_forbids_infinite_risk_and_needs_a_riskless_choice() -> None:
    prices, risks, budget, _ = _problem(1, 1)
    risks[:, :, 1:] = np.inf
    assert allocate(prices, risks, budget * 1e9).picks.tolist() == [0, 0, 0, 0]
    risks[:, 2, 0] = 1e-3
    with pytest.raises(ValueError, match="first choice has a risk"):
        allocate(prices, risks, budget)


def test_risks_are_means_over_rows_and_finite() -> None:
    state = CalibrationState({}, (8,), 2, 3)
    rest = np.zeros((2, 3, 3)), np.zeros((2, 3))
    state.add(8, 2, np.full((2, 3), 4.0), *rest)
    state.add(8, 2, np.full((2, 3), 2.0), *rest)
    assert state.mean(8).tolist() == [[1.5] * 3] * 2
    for wrong in (np.nan, np.inf, -1.0):
        with pytest.raises(ValueError, match="non-finite"):
            state.add(8, 1, np.full((2, 3), wrong), *rest)


def test_price_lines_interpolate_and_round_trip() -> None:
    table = PriceTable(
        "m", {"w": "shared"}, {"prefill": {1000: {"exact": Price(0.0, 1.0)}, 4000: {"exact": Price(0.0, 16.0)}}}
    )
    assert table.price("prefill", 2000, "exact").slope == pytest.approx(4.0)
    assert table.price("prefill", 8000, "exact").slope == pytest.approx(64.0)
    assert PriceTable.from_json(table.to_json()).to_json() == table.to_json()
    with pytest.raises(KeyError, match="no prefill price"):
        table.price("prefill", 1000, "w64")
    for text in ("{}", "[" * 200_000):
        with pytest.raises(ValueError, match="prices file"):
            PriceTable.from_json(text)


@pytest.mark.parametrize(("prices", "says"), [
    ({"prefill": {"64": {"exact": [-1.0, 2.0]}}}, "a constant of -1.0"),
    ({"prefill": {"64": {"exact": [math.nan, 2.0]}}}, "a constant of nan"),
    ({"prefill": {"64": {"exact": [0.0, 0.0]}}}, "one of them above"),
    ({"prefill": {"64": {"exact": [1.0, math.inf]}}}, "a slope of inf"),
    ({"prefill": {"64": {"exact": [1.0]}}}, "not a table of prices"),
    ({"prefill": {"64": {"exact": None}}}, "not a table of prices"),
    ({"prefill": {"64": {"exact": [10**400, 1.0]}}}, "not a table of prices"),
    ({"prefill": {"0": {"exact": [1.0, 1.0]}}}, "one below 1 token"), ({"prefill": {"64": {}}}, "without prices"),
    ({"prefill": []}, "not a table of prices"),
])  # fmt: skip
def test_a_table_of_what_are_no_prices_is_refused(prices: object, says: str) -> None:
    """The solver would take a negative price for a saving, and forbid exact attention where its price is no number."""
    with pytest.raises(ValueError, match=says):
        PriceTable.from_json(json.dumps({"machine": "m", "launch_of": {}, "prices": prices}))


def test_candidates_cross_kinds_with_precisions() -> None:
    def of(length: int, dtype: str = "float32", families: tuple[str, ...] = FAMILIES) -> Candidates:
        return candidates(Setting(length, 64, dtype, families, WINDOWS))

    found = of(4096)
    assert found.choices[0] == EXACT
    assert len(set(found.choices)) == len(found.choices)
    for choice, row in zip(found.choices, found.combine, strict=True):
        parts = [part for part, used in zip(found.parts, row, strict=True) if used]
        assert len(parts) == (choice.kind != "exact") + (precision_of(choice) != "model") + (choice.columns > 0)
    assert not any(precision_of(choice) == "bf16" for choice in of(4096, "bfloat16").choices)
    assert max(getattr(c.keys, "window", 0) for c in of(1024).choices) == 512
    assert max(getattr(c.keys, "window", 0) for c in of(8192).choices) == 5120
    assert of(4096, families=("rank",)).choices == (EXACT, make_choice(rank=32), make_choice(rank=48))
    with pytest.raises(ValueError, match="Did you mean 'window'"):
        of(4096, families=("windows",))
    # ranks are considered on a GPU where they are named
    assert offered(FAMILIES, on_cuda=False) == FAMILIES
    assert set(FAMILIES) - set(offered(FAMILIES, on_cuda=True)) == {"rank"}
    assert offered(("window", "rank"), on_cuda=True) == ("window", "rank")


def test_the_mean_kl_may_exceed_the_budget_by_the_distance_of_stock_implementations() -> None:
    gates = Gates(1e-3, rounding=1.2e-3)
    assert not gates.failures(9e-4, 2.1e-3, 1.0, 0, 0, 0)
    assert "above 2.20e-3" in gates.failures(9e-4, 2.3e-3, 1.0, 0, 0, 0)[0]
    assert gates.failures(1.1e-3, 1e-3, 1.0, 0, 0, 0), "the loss itself may not"
    assert gates.with_flips(0.6, 0.0).top1 < Gates(1e-3).with_flips(0.6, 0.0).top1


def test_bound_covers_the_truth_at_its_level() -> None:
    random = np.random.default_rng(0)
    tokens = np.full(12, 100)
    covered = [clustered_ratio(random.normal(0.3, 1.0, 12) * 100, tokens).upper(0.95) >= 0.3 for _ in range(2000)]
    assert 0.935 < float(np.mean(covered)) < 0.965
    assert clustered_ratio(np.array([1.0]), np.array([10])).upper(0.95) == math.inf


def test_clusters_are_documents_where_there_are_enough() -> None:
    sums, tokens = clustered(["a", "b"] * 8, [1.0] * 16, [10] * 16)
    assert len(sums) == 16
    sums, tokens = clustered([str(i % 8) for i in range(16)], [1.0] * 16, [10] * 16)
    assert sums.tolist() == [2.0] * 8
    assert tokens.tolist() == [20] * 8
    sums, tokens = clustered(["book"] * 29 + list("abcdefg"), [1.0] * 36, [10] * 36)
    assert len(sums) == 36, "a book and seven pages are no eight documents"


@pytest.mark.parametrize("sizes", [(29, *[1] * 7), (10, *[1] * 26), (8, 6, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1)])
def test_documents_of_unequal_size_err_no_oftener(sizes: tuple[int, ...]) -> None:
    """Beside a book of 29 chunks seven pages tell half of the error; a bound at 5 % then fails in 15 % of the cases."""
    random = np.random.default_rng(0)
    names = [str(document) for document, size in enumerate(sizes) for _ in range(size)]
    tokens = [1000] * len(names)
    drawn = (random.standard_normal(len(names)).tolist() for _ in range(4000))
    ratios = [clustered_ratio(*clustered(names, losses, tokens)) for losses in drawn]
    for level in (0.05, 0.05 / 3):
        assert 0.5 * level < float(np.mean([ratio.upper(1 - level) < 0.0 for ratio in ratios])) < 1.35 * level


@pytest.mark.parametrize(
    ("change", "word"),
    [({}, ""), ({"upper": 2e-3}, "upper bound"), ({"kl": 2e-3}, "KL"), ({"top1": 0.9}, "agrees"), ({"lost": 6}, "lost"),
     ({"upper": math.nan}, "upper bound"), ({"lost": 2}, ""),
     ({"lost": 6, "won": 5}, "")],
)  # fmt: skip
def test_each_gate_can_fail(change: dict[str, float], word: str) -> None:
    """Two needles of thirty may be lost by chance; six against none may not."""
    values = {"upper": 5e-4, "kl": 5e-4, "top1": 0.995, "lost": 0, "won": 0, "retrieved": 30}
    reasons = Gates(1e-3, 0.99).failures(**{**values, **change})  # type: ignore[arg-type]
    assert (len(reasons) == 1 and word in reasons[0]) if word else reasons == ()


def test_gates_of_the_user_are_kept_to_the_letter() -> None:
    assert Gates(1e-3, needles=0.02).failures(0.0, 0.0, 1.0, 2, 0, 30)
    # what a search rehearses leaves a margin to what a proof refuses
    assert [Gates(1e-3).forgets(lost, 0, 30, REHEARSED) for lost in (2, 3, 4, 5, 6)] == [False, *[True] * 4]
    assert [Gates(1e-3).forgets(lost, 0, 30) for lost in (2, 3, 4, 5, 6)] == [*[False] * 3, True, True]
    assert Gates(1e-3, 0.99).with_flips(0.9, 0.5).top1 == 0.99
    assert Gates(1e-3).with_flips(0.63, 0.0).top1 == pytest.approx(1 - 1.5 * 0.63 * math.sqrt(1e-3))
    assert Gates(1e-3).with_flips(0.63, 0.2).top1 == pytest.approx(0.8), "never stricter than stock against stock"
    name, share = Gates(1e-3, 0.99).nearest(9e-4, 1e-4, 0.995)
    assert name == "the bound of the increase"
    assert share == pytest.approx(0.9)
    assert Gates(1e-3, 0.99).nearest(1e-4, 1e-4, 0.991)[0] == "the likeliest token"


def test_units_of_a_launch_share_its_fixed_cost() -> None:
    """Shares add up to the price of the whole."""
    rng = np.random.default_rng(3)
    prices = rng.random((6, 3))
    launches = _launches([0, 0, 0, 1, 1, 1], [0, 1, 1], [0.5, 0.25, 0.125])
    for _ in range(20):
        picks = rng.integers(0, 3, 6)
        shares = shared_prices(picks, prices, launches)
        assert shares.sum() == pytest.approx(evaluate(picks, prices, np.zeros((1, 6, 3)), launches).price)
    shares = shared_prices(np.array([0, 1, 2, 0, 0, 0]), np.zeros((6, 3)), launches)
    assert shares.tolist() == pytest.approx([0.5, 0.125, 0.125, *[0.5 / 3] * 3])


def test_a_choice_is_not_cheap_because_its_launch_is_dear_only_once() -> None:
    """What a launch costs with the choice counts, though others of the same launch cost little."""
    prices = np.array([[1.0, 0.9, 0.0]] * 2)
    risks = np.zeros((1, 2, 3))
    launches = _launches([0, 0], [0, 0, 0], [0.1, 0.1, 5.0])
    found = allocate(prices, risks, np.ones(1), launches, gap=0.0)
    assert found.picks.tolist() == [1, 1]
    assert found.price == pytest.approx(1.9)
    assert evaluate(np.array([2, 2]), prices, risks, launches).price == pytest.approx(5.0), "the launch once"
    assert evaluate(np.array([1, 2]), prices, risks, launches).price == pytest.approx(5.9), "its dearest"


@pytest.mark.parametrize("slope", [0.0, 1e-12])
@pytest.mark.parametrize("seed", range(6))
def test_launches_that_dwarf_the_prices_of_heads_are_no_trouble_for_the_solver(seed: int, slope: float) -> None:
    """So it is in decode: a step takes as long as its launch, which is a millionth of what the solver resolves."""
    random = np.random.default_rng(seed)
    prices = np.tile(3e-7 * slope * random.random(3), (4, 1))
    risks = 1e-6 * random.random((4, 1)) * random.random(3)[None, None]
    risks[:, :, 0] = 0.0
    launches = _launches([0, 0, 1, 1], random.integers(0, 2, 3), 3e-7 * random.random(3))
    budget = np.array([2e-6])
    assert allocate(prices, risks, budget, launches).price <= 1.0001 * _cheapest(prices, risks, budget, launches)


@given(seed=st.integers(0, 10_000), noise=st.sampled_from([0.0, 1e-7, 1e-4, 1e-2]), fixed=st.booleans())
@settings(deadline=None, max_examples=40)
def test_every_layer_of_an_allocation_is_cheaper_than_exact(seed: int, noise: float, fixed: bool) -> None:
    """Also where prices differ by less than the gap at which the solver may stop, or not at all."""
    random = np.random.default_rng(seed)
    prices = np.tile(random.choice([0.0, 1e-4]) * (1.0 + noise * random.normal(size=4)), (6, 1))
    risks = random.exponential(1e-5, (1, 6, 4))
    risks[:, :, 0] = 0.0
    constant = 3e-4 * (1.0 + noise * random.normal(size=4))
    launches = _launches([0, 0, 0, 1, 1, 1], random.integers(0, 2, 4), constant) if fixed else Launches.free(6, 4)
    found = allocate(prices, risks, np.ones(1), launches)
    exact = np.zeros(6, dtype=np.int64)
    for layer in (slice(0, 3), slice(3, 6)):
        own, full = (shared_prices(picks, prices, launches)[layer] for picks in (found.picks, exact))
        assert not found.picks[layer].any() or own.sum() < full.sum()


def test_a_solver_that_answers_with_a_dearer_plan_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = np.array([[1.0, 1.5], [1.0, 0.5], [1.0, 0.5]])
    launches = _launches([0, 1, 2], [0, 1], [1.0, 1.5])
    dear = SimpleNamespace(x=np.array([0, 1, 0, 1, 0, 1] + [0] * 6), message="")
    monkeypatch.setattr(knapsack, "milp", lambda *_, **__: dear)
    found = allocate(prices, np.zeros((1, 3, 2)), np.ones(1), launches)
    assert found.picks.tolist() == [0, 0, 0], "dearer, and as dear as exact"
    assert allocate(prices, np.zeros((1, 3, 2)), np.ones(1)).picks.tolist() == [0, 1, 1]
    for dearer in (1.0, 1.00005):  # by nothing, and by less than the solver's gap
        prices = np.tile([1.0, dearer], (3, 1))
        assert allocate(prices, np.zeros((1, 3, 2)), np.ones(1)).picks.tolist() == [0, 0, 0]


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_the_price_of_a_plan_is_that_of_its_launches_one_by_one(seed: int) -> None:
    """In every call, by the lines of the layer's own kind, each launch as dear as its dearest choice."""
    random = np.random.default_rng(seed)
    kinds, names, layers = ("", " in 64"), ["one", "two", "one"], [0, 0, 1, 1, 2, 2]
    labels = [[f"{name}{kinds[layer % 2]}" for name in ("exact", "w8", "bf16")] for layer in layers]
    lines = {
        phase: {length: {name: Price(*random.random(2)) for own in labels[1:3] for name in own} for length in (32, 64)}
        for phase in ("prefill", "decode")
    }
    calls = {("prefill", 32): 1.0, ("prefill", 64): 1.0, ("decode", 32): 5.0}
    prices, launches = of_units(PriceTable("a table", {}, lines), calls, labels, names, layers)
    picks = random.integers(0, 3, 6)
    seconds = 0.0
    for (phase, length), count in calls.items():
        for layer in range(3):
            mine = [unit for unit in range(6) if layers[unit] == layer]
            for name in {names[picks[unit]] for unit in mine}:
                own = [lines[phase][length][labels[u][picks[u]]] for u in mine if names[picks[u]] == name]
                seconds += count * (max(line.constant for line in own) + sum(line.slope for line in own))
    assert evaluate(picks, prices, np.zeros((1, 6, 3)), launches).price == pytest.approx(seconds)


@pytest.mark.skipif(os.name != "posix", reason="its C library goes by another name elsewhere")
def test_a_solver_that_writes_past_python_is_not_heard(capfd: pytest.CaptureFixture[str]) -> None:
    """As HiGHS does, held back by C until later, too."""
    libc = ctypes.CDLL(None)
    print("before")
    with silenced():
        os.write(1, b"from the solver")
        libc.puts(b"from its C")
    libc.fflush(None)
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"
    with pytest.raises(RuntimeError), silenced():
        raise RuntimeError
    print("still here")
    assert capfd.readouterr().out == "still here\n"


@pytest.mark.skipif(os.name != "posix", reason="its C library goes by another name elsewhere")
def test_progress_is_heard_while_a_solver_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever letters the terminal has."""
    with (tmp_path / "out").open("w", encoding="ascii", errors="backslashreplace") as out:
        monkeypatch.setattr("sys.stdout", out)
        with silenced(out.fileno()):
            os.write(out.fileno(), b"from the solver")
            beat = threading.Thread(target=Console().print, args=("joint: 20 % ≤",))
            beat.start()
            beat.join()
        print("after")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "joint: 20 % \\u2264\nafter\n"


def test_allocating_is_silent(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    solve: Any = scipy.optimize.milp
    monkeypatch.setattr(knapsack, "milp", lambda *given, **more: (os.write(1, b"a line"), solve(*given, **more))[1])
    prices, risks = np.array([[2.0, 1.0]]), np.zeros((1, 1, 2))
    assert knapsack.allocate(prices, risks, np.ones(1)).picks.tolist() == [1]
    assert capfd.readouterr().out == ""
    monkeypatch.setattr("sys.stdout", None)
    with silenced(file=1 << 20):  # no file of this process has such a number
        assert knapsack.allocate(prices, risks, np.ones(1)).picks.tolist() == [1]


def test_picks_beyond_the_budget_are_made_exact_by_the_least_that_helps() -> None:
    prices, budget, free = np.tile([3.0, 1.0], (3, 1)), np.array([1.0]), Launches.free(3, 2)
    risks = np.array([[[0.0, 0.4], [0.0, 0.5], [0.0, 0.6]]])
    for factor, picks in ((1, [1, 0, 1]), (3, [0, 0, 0])):
        assert knapsack.repair(np.array([1, 1, 1]), prices, factor * risks, budget, free).picks.tolist() == picks


def test_a_solver_without_an_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "milp", lambda *given, **options: SimpleNamespace(x=None, message="time is up"))
    with pytest.raises(ValueError, match="the solver found no allocation: time is up"):
        allocate(np.array([[2.0, 1.0]]), np.zeros((1, 1, 2)), np.ones(1))
