"""A plan that contradicts its own proof is no plan, and no number in one is beyond what arithmetic bears."""

import functools
import json
import math
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaattn_hf.plans.plan import PLAN_FORMAT, Plan, PlanError

from ..support.command import adaattn
from .test_plan import make_plan

GOOD = make_plan().to_dict()
VERDICT: dict[str, Any] = GOOD["verified"]


def of(**changes: Any) -> Plan:
    return Plan.from_dict({**GOOD, **changes})


def verdict(**changes: Any) -> Plan:
    return of(verified={**VERDICT, **changes})


def test_a_bound_above_the_budget_did_not_pass() -> None:
    with pytest.raises(
        PlanError, match=r"passed is true with an upper bound of 9\.0 .* budget of 0\.001: the plan con"
    ):
        verdict(upper=9.0)
    with pytest.raises(PlanError, match=r"protocol\.cache\.verified\.passed is true with an upper bound of 9\.0"):
        of(protocol={"cache": {"stored": "int8", "streaming": False, "verified": {**VERDICT, "upper": 9.0}}})
    assert verdict(upper=9.0, passed=False).verified is not None
    assert verdict(upper=GOOD["budget"]).verified is not None


@pytest.mark.parametrize(
    "name", ["top1", "confidence", "activation", "activation_keys", "retrieval_stock", "retrieval_plan"]
)
@pytest.mark.parametrize("value", [1e6, 1.0001, -0.1])
def test_shares_lie_between_0_and_1(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=rf"verified: {name} is .*, expected a number from 0 to 1"):
        verdict(**{name: value})


@pytest.mark.parametrize("changes", [
    {"delta_nll": 6e-4}, {"kl": -1.0}, {"kl_p999": -1e-9}, {"predicted_kl": -1.0}, {"tokens": 0}, {"tries": 0},
    {"documents": 0}, {"upper": -1e300}, {"kl": math.nan}, {"kl": math.inf},
], ids=str)  # fmt: skip
def test_a_verdict_that_no_measurement_gives_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=rf"verified: ({next(iter(changes))}|upper)"):
        verdict(**changes)


@pytest.mark.parametrize("missing", ["", "ab" * 32, "model"])
def test_a_plan_without_the_hash_of_its_model_is_none(missing: str) -> None:
    with pytest.raises(PlanError, match=r"weight_hash is .*expected 'model:' and the hash of all weights"):
        of(weight_hash=missing)


@pytest.mark.parametrize(("name", "value", "says"), [
    ("configuration", {}, "configuration is empty, expected the model's settings; calibrate again"),
    ("configuration", [], "configuration is list, expected a mapping"),
    ("format", PLAN_FORMAT - 1, "plan format is 1, this version reads 2; calibrate again"),
    ("protocol", {"settings": []}, r"protocol\.settings is list"),
    ("protocol", {"scoring": 5}, r"protocol\.scoring is int"),
    ("protocol", {"decode": "fast"}, r"protocol\.decode is 'fast'"),
])  # fmt: skip
def test_fields_that_say_nothing_of_the_model_or_the_proof_are_refused(name: str, value: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        of(**{name: value})


HUGE = [10**400, -(10**400), 1e308, 10**5000]


@pytest.mark.parametrize("value", HUGE, ids=lambda value: f"{value:.0e}" if value in (1e308,) else "long")
@pytest.mark.parametrize(
    "where", [("budget",), ("seed",), ("lengths", 0), ("units", 0, "price"), ("verified", "kl"), ("verified", "tokens")]
)
def test_huge_numbers_are_refused_in_a_sentence(where: tuple[Any, ...], value: Any) -> None:
    data = make_plan().to_dict()
    holder: Any = functools.reduce(operator.getitem, where[:-1], data)
    holder[where[-1]] = value
    with pytest.raises(PlanError, match="expected a"):
        Plan.from_dict(data)


@pytest.mark.parametrize("price", [1e11, 1e-29, 0.0])
def test_extreme_prices_are_drawn(price: float, tmp_path: Path) -> None:
    units = [{**GOOD["units"][0], "price": price, "exact_price": 1e11}, GOOD["units"][1]]
    (tmp_path / "plan.json").write_text(of(units=units).to_json(), encoding="utf-8")
    adaattn("plan", "show", f"{tmp_path}/plan.json", "--html", f"{tmp_path}/p.html")
    with pytest.raises(PlanError, match="expected 0 or at least 1e-30 seconds"):
        of(units=[{**GOOD["units"][0], "price": 5e-324}])


@pytest.mark.parametrize(
    "cache",
    ["k8v4", [], {}, {"stored": "int8"}, {"stored": "int8", "streaming": 1}, {"stored": 5, "streaming": True},
     {"stored": "int3", "streaming": True}, {"stored": ["int8"], "streaming": True}],
    ids=str,
)  # fmt: skip
def test_a_cache_of_another_kind_is_refused_when_the_plan_is_read(cache: Any) -> None:
    with pytest.raises(PlanError, match=r"protocol\.cache is .*expected a mapping with stored, one of model, int8, k8"):
        of(protocol={"cache": cache})
    assert of(protocol={"cache": {"stored": "k8v4", "streaming": True}}).cache == ("k8v4", True)


def test_no_file_holds_a_permission() -> None:
    assert "unverified" not in json.dumps(replace(make_plan(), verified=None).to_dict())
