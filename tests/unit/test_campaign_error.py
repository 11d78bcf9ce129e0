"""How often a whole campaign passes a plan that breaks the budget: thousands of them, on simulated held-out text.

Everything that decides is the code that runs: the campaign, the looks, the law of the loss, the gates. What a model
would say is drawn: sequences whose mean loss difference is c times the KL of the plan, with noise of heavy tails.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaattn_hf.calibration import calibrate as campaign
from adaattn_hf.calibration import proof, search
from adaattn_hf.calibration.calibrate import Campaign
from adaattn_hf.calibration.inputs import Run
from adaattn_hf.calibration.passes import StockDistance
from adaattn_hf.calibration.search import LEAST_KL, Found, Joint
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.team import Team
from adaattn_hf.eval.windows import TokenSequence
from adaattn_hf.plans.limits import Gates
from adaattn_hf.policy.aim import Observation
from adaattn_hf.policy.knapsack import Allocation

LENGTH = 4096
SETTINGS = CalibrationSettings(budget=1e-3, lengths=(LENGTH,))
SPREAD = 0.03
POOL = SETTINGS.most_held_out * (SETTINGS.tries + SETTINGS.bolder)


class World:
    """A model that loses `per_kl` nats per nat of KL, beside a KL of rounding that costs nothing in the mean."""

    def __init__(self, per_kl: float, seed: int, rounding: float = 0.0) -> None:
        self.per_kl, self.rounding, self.random = per_kl, rounding, np.random.default_rng(seed)

    def deltas(self, kl: float, count: int) -> np.ndarray:
        noise = self.random.standard_t(5, count) / np.sqrt(5 / 3)
        return np.asarray(self.per_kl * kl + SPREAD * np.sqrt(kl + self.rounding) * noise)

    def joint(self, kl: float) -> Joint:
        whole = kl + self.rounding
        observed = Observation(whole, self.deltas(kl, SETTINGS.joint), ("text",) * SETTINGS.joint)
        return Joint(whole, 0.6 * np.sqrt(whole), 30 * whole, observed, self.rounding)


def simulate(
    monkeypatch: pytest.MonkeyPatch, worlds: list[World], choose: Callable[[World, Any], float], saving: float = 1.0
) -> tuple[int, int, list[float]]:
    """Runs a campaign in each world; returns plans met, plans met that break the budget, and the share used.

    A plan takes a time of its KL to the power of `-saving`.
    """
    sequence = TokenSequence("book", (1,))
    windows = [SimpleNamespace(targets=range(LENGTH - 1))]
    state: dict[str, Any] = {}

    def seek(passes: Any, aim: Any, alpha: Any, history: Any, taught: Any) -> Any:
        world = state["world"]
        state["kl"] = kl = choose(world, aim)
        joint = world.joint(kl)
        aim = taught(aim, LENGTH, [joint])
        allocation = Allocation(np.ones(1, dtype=np.int64), kl**-saving, np.array([kl]))
        return Found(allocation, {LENGTH: joint}, {LENGTH: kl}), alpha, aim

    def gather(inputs: Any, tap: Any, shard: Any, before: Any, *_: Any) -> Any:
        for delta in state["world"].deltas(state["kl"], len(shard)):
            before.names.append(str(len(before.names)))
            before.sources.append("text")
            before.sums.append(delta * (LENGTH - 1))
            before.tokens.append(LENGTH - 1)
            before.kl.append(np.array([state["kl"] + state["world"].rounding]))
            before.agree += LENGTH - 1
        return before

    monkeypatch.setattr(campaign, "seek", seek)
    monkeypatch.setattr(proof, "bound_layers", lambda measurement, picks: {})
    monkeypatch.setattr(proof, "gather", gather)
    monkeypatch.setattr(proof, "activation", lambda *_: (1.0, 1.0))
    scoring = SimpleNamespace(generates=False, causal=True)
    sample = SimpleNamespace(held_out=(sequence,) * POOL, joint=(sequence,))
    inputs = SimpleNamespace(
        settings=SETTINGS, samples={LENGTH: sample}, scoring=scoring, arms=None, other_source=False, sources=1,
        team=Team(), windows=lambda one: windows, run=Run(), pace=None, left=math.inf, refuse_late=lambda: None,
    )  # fmt: skip
    bound = SimpleNamespace(dtype="bfloat16")
    layers = SimpleNamespace(indices=(0,), kv_heads=1, seconds={LENGTH: 1.0}, units=[(0, 0)], bound=bound)
    met, broken, used = 0, 0, []
    for world in worlds:
        state["world"] = world
        measurement: Any = SimpleNamespace(inputs=inputs, layers=layers)
        _, end = campaign.searched(Campaign(measurement, StockDistance(0.0, world.rounding)))
        if end.passed is not None:
            found, evidence = end.passed
            met += 1
            broken += world.per_kl * found.joint[LENGTH].added > SETTINGS.budget
            used.append(evidence.worst.upper / SETTINGS.budget)
    return met, broken, used


@pytest.mark.parametrize("rounding", [0.0, 1.2e-3])
def test_plans_just_beyond_the_budget_hardly_ever_pass(monkeypatch: pytest.MonkeyPatch, rounding: float) -> None:
    """The hardest case: whatever was learned, every plan loses 1.001 times the budget."""
    worlds = [World(2.0, seed, rounding) for seed in range(2000)]
    met, broken, _ = simulate(monkeypatch, worlds, lambda world, aim: 1.001 * SETTINGS.budget / world.per_kl)
    assert met == broken
    assert broken / len(worlds) <= 0.05
    assert broken > 0.005 * len(worlds), "a test that never passes would prove nothing here"


def test_campaigns_spend_the_budget_and_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search as it aims, in worlds that lose half, twice and four times what the first guess says."""
    worlds = [World((0.5, 1.0, 2.0, 4.0)[seed % 4], seed) for seed in range(2000)]

    def aimed(world: World, aim: Any) -> float:
        return float(aim.affordable(LENGTH) * np.exp(0.1 * world.random.standard_normal()))

    met, broken, used = simulate(monkeypatch, worlds, aimed)
    assert broken / len(worlds) <= 0.05
    assert met / len(worlds) >= 0.95
    assert float(np.median(used)) >= 0.6


def test_a_budget_smaller_than_the_rounding_of_half_precision_is_spent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exact kernels lie further apart in KL than the budget, and neither loses anything to the other."""
    worlds = [World((0.5, 1.0, 2.0)[seed % 3], seed, rounding=1.2 * SETTINGS.budget) for seed in range(1200)]
    met, broken, used = simulate(monkeypatch, worlds, lambda world, aim: float(aim.affordable(LENGTH)))
    assert broken / len(worlds) <= 0.05
    assert met / len(worlds) >= 0.9
    assert float(np.median(used)) >= 0.6


def test_a_budget_is_spent_where_time_falls_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked model: loss hardly rises with the KL, and twice the KL saves one percent of the time."""

    def median_used() -> float:
        worlds = [World(0.1, seed) for seed in range(400)]
        _, broken, used = simulate(monkeypatch, worlds, lambda world, aim: float(aim.affordable(LENGTH)), saving=0.02)
        assert broken / len(worlds) <= 0.05
        return float(np.median(used))

    spent = median_used()
    monkeypatch.setattr(campaign, "BOLDER", 0.98)
    assert spent >= 0.6 > median_used()


def test_a_plan_that_adds_less_than_rounding_can_tell_is_not_taken_to_add_nothing() -> None:
    """Risks that are re-scaled by it would become nothing, and the next plan anything."""
    observed = Observation(1e-3, np.zeros(1), ("text",))

    def of(kl: float, rounding: float) -> tuple[float, float]:
        joint = Joint(kl, 0.0, 0.0, observed, rounding)
        return joint.added, joint.visible

    assert of(1.1e-3, 1.2e-3) == pytest.approx((LEAST_KL, 1.2e-4))
    assert of(1.8e-3, 1.2e-3) == pytest.approx((6e-4, 6e-4))
    assert of(3e-4, 0.0) == pytest.approx((3e-4, 3e-4))


@pytest.mark.parametrize(
    ("rounding", "slope", "beside"),
    [(0.0, 3.0, 0.0), (1.4e-3, 3.0, 0.0), (1.2e-3, 1.5, 0.9e-4), (1.4e-3, 0.3, -0.2e-4)],
    ids=["single precision", "a limit below what is told", "a KL that hardly falls", "a KL below rounding's"],
)
def test_a_search_ends_within_its_limit_whatever_rounding_hides(
    monkeypatch: pytest.MonkeyPatch, rounding: float, slope: float, beside: float
) -> None:
    """Plans whose KL is a multiple of what is predicted, beside what two exact kernels lie apart on this text."""
    limit = 1e-4

    def solve(measurement: Any, budget: Any, needles: Any) -> Allocation:
        return Allocation(np.array([round(budget[0] * 1e12)]), -float(budget[0]), budget)

    def joint(picks: Any, length: int) -> Joint:
        kl = rounding + beside + slope * picks[0] * 1e-12
        return Joint(kl, 0.0, 0.0, Observation(kl, np.zeros(1), ("text",)), rounding)

    monkeypatch.setattr(search, "solve", solve)
    settings = SimpleNamespace(lengths=(LENGTH,))
    inputs = SimpleNamespace(settings=settings, run=Run(), refuse_late=lambda: None)
    passes: Any = SimpleNamespace(measurement=SimpleNamespace(inputs=inputs), joint=joint)
    aim: Any = SimpleNamespace(affordable=lambda *_: limit, needles={}, gates=Gates(limit))
    found, *_ = search.seek(passes, aim, np.ones(1), [], lambda aim, *_: aim)
    assert found is not None
    assert found.joint[LENGTH].added <= (1.0 + search.TOLERANCE) * limit
    assert found.joint[LENGTH].added >= 0.25 * limit or beside < 0.0
