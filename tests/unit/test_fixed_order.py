"""How candidates are fixed, and how often a sequence of them returns one beyond its budget."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaattn_hf.calibration import search
from adaattn_hf.calibration import search as steps
from adaattn_hf.calibration.inputs import Run
from adaattn_hf.calibration.search import LEAST_KL, SHARES, Joint, falling, ladder
from adaattn_hf.plans.limits import Gates
from adaattn_hf.policy.knapsack import Allocation
from studies.fixed_order import returned, rows

LENGTH = 4096


def test_plans_just_beyond_the_budget_hardly_ever_pass(checkout: Path) -> None:
    """By losses of real text drawn anew and of heavy tails; the page has more runs."""
    kept = json.loads((checkout / "docs" / "results" / "fixed_order.json").read_text(encoding="utf-8"))
    *found, boldest = rows(np.array(kept["losses"]), 400)
    chance = 3.0 * np.sqrt(0.05 * 0.95 / 400)
    assert {words: beyond for words, beyond, _ in found if beyond > 0.05 + chance} == {}
    assert max(beyond for _, beyond, _ in found) > 0.01, "a test that never passes would prove nothing here"
    assert boldest[1] > 0.15, "looking for the best of all errs more often"


def test_the_last_candidate_before_the_first_failure_is_returned() -> None:
    noise = 0.01 * np.resize([1.0, -1.0], 24)
    losses = np.array([0.2, 0.5, 1.5, 0.3])[:, None] + noise
    assert [returned(losses[:many], 1.0) for many in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert returned(losses[2:], 1.0) == -1
    assert returned(losses, 1.0, stops=False) == 3


def climbed(
    monkeypatch: pytest.MonkeyPatch, gates: Gates, kl_of: Any, needles: Any = lambda aimed: (0, 0, 0), **settings: Any
) -> tuple[list[steps.Candidate], Gates, bool]:
    """The ladder of a model whose plans have a KL `kl_of` what is aimed at, and cost less the more is."""

    def solve(measurement: Any, limit: Any, tamed: Any) -> Allocation:
        aimed = min(float(limit[0]), *(tamed.values() or [np.inf]), np.inf)
        return Allocation(np.array([round(aimed * 1e12)]), -aimed, np.array([aimed]))

    def joint(measurement: Any, picks: Any, length: int) -> Joint:
        aimed = picks[0] * 1e-12
        kl = gates.rounding + kl_of(aimed)
        return Joint(kl, 0.6 * np.sqrt(max(kl, 0.0)), 30 * kl, 0.0, gates.rounding, needles(aimed), aimed)

    monkeypatch.setattr(search, "solve", solve)
    monkeypatch.setattr(steps, "joint", joint)
    known = {"lengths": (LENGTH,), "aim": "prompt", "with_cache": False, "kv_bytes": None, **settings}
    inputs = SimpleNamespace(settings=SimpleNamespace(**known), run=Run(), refuse_late=lambda: None)
    measurement: Any = SimpleNamespace(inputs=inputs)
    return ladder(measurement, {}, gates, 0.0, [])


@pytest.mark.parametrize("slope", [0.2, 1.0, 5.0])
def test_candidates_are_at_the_shares_of_the_budget_whatever_risks_foretell(
    monkeypatch: pytest.MonkeyPatch, slope: float
) -> None:
    found = climbed(monkeypatch, Gates(1e-3), lambda aimed: slope * aimed)[0]
    shares = [one.joint[LENGTH].kl / 1e-3 for one in found]
    assert shares == sorted(shares)
    for share in SHARES:
        assert min(abs(one - share) for one in shares) < 1e-3, (share, shares)
    costs = [one.way.cost for one in found]
    assert costs == sorted(costs, reverse=True)
    assert falling(found[::-1]) == [found[-1]], "what costs more than a safer one is no candidate"


@pytest.mark.parametrize(
    ("rounding", "slope", "beside"),
    [(0.0, 3.0, 0.0), (1.4e-3, 3.0, 0.0), (1.2e-3, 1.5, 0.9e-4), (1.4e-3, 0.3, -0.2e-4)],
    ids=["single precision", "a limit below what is told", "a KL that hardly falls", "a KL below rounding's"],
)
def test_candidates_stay_within_the_budget_whatever_rounding_hides(
    monkeypatch: pytest.MonkeyPatch, rounding: float, slope: float, beside: float
) -> None:
    """Plans whose KL is a multiple of what is predicted, beside what two exact kernels lie apart on this text."""
    found = climbed(monkeypatch, Gates(1e-4, rounding=rounding), lambda aimed: beside + slope * aimed)[0]
    assert found
    assert max(one.added(LENGTH) for one in found) <= 1e-4


def test_limits_that_the_user_sets_lower_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(gates: Gates) -> float:
        return max(one.added(LENGTH) for one in climbed(monkeypatch, gates, lambda aimed: aimed)[0])

    assert most(Gates(1e-3)) == pytest.approx(0.9e-3, rel=1e-3)
    assert most(Gates(1e-3, max_kl=1e-4)) == pytest.approx(0.9e-4, rel=1e-3)
    assert most(Gates(1e-3, top1=0.99)) == pytest.approx(0.9 * (0.01 / 0.6) ** 2, rel=1e-3)
    assert Gates(1e-3, max_kl=1e-4).failures(0.0, 2e-4, 1.0, 0, 0, 0)
    assert Gates(1e-3, max_kl=1.0).most_kl == 1e-3, "no user allows more than the budget"


def test_plans_that_lose_needles_are_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    found, *_ = climbed(monkeypatch, Gates(1e-3), lambda aimed: aimed, lambda aimed: (20 * (aimed > 2e-4), 0, 48))
    assert {one.joint[LENGTH].needles for one in found} == {(0, 0, 48)}
    assert max(one.added(LENGTH) for one in found) > 0.5e-4
    none, _, forgetful = climbed(monkeypatch, Gates(1e-3), lambda aimed: aimed, lambda aimed: (20, 0, 48))
    assert (none, forgetful) == ([], True)


def test_a_plan_that_adds_less_than_rounding_can_tell_is_not_taken_to_add_nothing() -> None:
    """Risks that are re-scaled by it would become nothing, and the next plan anything."""

    def of(kl: float, rounding: float) -> tuple[float, float]:
        joint = Joint(kl, 0.0, 0.0, 0.0, rounding)
        return joint.added, joint.visible

    assert of(1.1e-3, 1.2e-3) == pytest.approx((LEAST_KL, 1.2e-4))
    assert of(1.8e-3, 1.2e-3) == pytest.approx((6e-4, 6e-4))
    assert of(3e-4, 0.0) == pytest.approx((3e-4, 3e-4))
