"""The plan file: byte-stable; nothing unknown, out of range or against its own proof gets in."""

import functools
import json
import math
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_cli.pictures.headline import details, grid, heat_map
from adaattn_hf.plans.choices.window import Window
from adaattn_hf.plans.plan import (
    EXACT,
    MOST_HEADS,
    MOST_LENGTHS,
    PLAN_FORMAT,
    Choice,
    LayerPlan,
    Plan,
    PlanError,
    UnitRecord,
    Verified,
)

from ..support.choices import make_choice
from ..support.command import adaattn


def make_plan(**changes: Any) -> Plan:
    verified = Verified(True, 1e-4, 5e-4, 0.98, 1, 12, 4000, 2e-4, 1e-2, 0.995, 0.5, 0.5, 1.0, 0.4, 2e-4, "passed")
    plan = Plan(
        PLAN_FORMAT, "llama", f"model:{'ab' * 32}", {"rms_norm_eps": 1e-6}, "float32",
        "0.1.0", "2.13.0", "5.23.0", 1e-3, 0, "cd" * 32, {"rows": 8},
        (512, 1024),
        (LayerPlan(1, "ef" * 32, (make_choice("window", 256, 16, precision="bf16"), EXACT)),),
        (UnitRecord(1, 0, 1e-5, 0.1, 0.3, 0.01, 0.02, 2e-4), UnitRecord(1, 1, 0.0, 0.3, 0.3, 0.0, 0.0, 0.0)),
        verified, "", (),
    )  # fmt: skip
    return replace(plan, **changes)


_CHOICES = st.one_of(
    st.builds(make_choice, precision=st.sampled_from(["model", "bf16", "int8"]), rank=st.integers(0, 64)),
    st.builds(make_choice, kind=st.just("window"), window=st.integers(1, 9999), sinks=st.integers(0, 64)),
)


@given(choices=st.lists(_CHOICES, min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_round_trip_is_the_same_bytes(choices: list[Choice]) -> None:
    plan = make_plan(layers=(LayerPlan(3, "x", tuple(choices)),))
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("path", [(), ("layers", 0), ("layers", 0, "choices", 0), ("units", 0), ("verified",)])
def test_unknown_and_missing_keys_are_refused_at_every_depth(path: tuple[Any, ...]) -> None:
    def at(data: Any) -> dict[str, Any]:
        for key in path:
            data = data[key]
        return data  # type: ignore[no-any-return]

    data = make_plan().to_dict()
    at(data)["surprise"] = 1
    with pytest.raises(PlanError, match="got 'surprise', expected one of"):
        Plan.from_dict(data)
    data = make_plan().to_dict()
    name = sorted(set(at(data)) - {"format"})[0]
    del at(data)[name]
    with pytest.raises(PlanError, match=f"lacks the keys.*{name}"):
        Plan.from_dict(data)


@pytest.mark.parametrize("bad", [
    {"kind": "windows"}, {"precision": "fp8"}, {"kind": "window"}, {"window": 8}, {"kind": "blocks"},
    {"rank": -1},
    {"rank": True}, {"sinks": 4}, {"kind": "window", "window": 2.5},
])  # fmt: skip
def test_choices_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        make_choice(**bad)


def test_plans_out_of_order_or_of_another_format_are_refused() -> None:
    for other in (99, True, 1.0):
        with pytest.raises(PlanError, match="format"):
            Plan.from_dict({**make_plan().to_dict(), "format": other})
    with pytest.raises(PlanError, match=r"budget is -0\.001, expected a number from 0"):
        Plan.from_dict({**make_plan().to_dict(), "budget": -0.001})
    with pytest.raises(PlanError, match="lengths"):
        make_plan(lengths=(1024, 512))
    layer = make_plan().layers[0]
    with pytest.raises(PlanError, match="rising"):
        make_plan(layers=(layer, layer))
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json("{")
    with pytest.raises(PlanError, match="not JSON: it is nested too deeply"):
        Plan.from_json("[" * 200_000)
    with pytest.raises(PlanError, match="no choices"):
        LayerPlan(0, "", ())


def test_plans_larger_than_any_model_are_refused_before_they_are_walked() -> None:
    data = make_plan().to_dict()
    choices = [data["layers"][0]["choices"][0]] * (MOST_HEADS + 1)
    with pytest.raises(PlanError, match=rf"choices has {MOST_HEADS + 1} entries, expected at most {MOST_HEADS}"):
        Plan.from_dict({**data, "layers": [{**data["layers"][0], "choices": choices}]})
    with pytest.raises(PlanError, match=rf"lengths has {MOST_LENGTHS + 1} entries"):
        Plan.from_dict({**data, "lengths": list(range(1, MOST_LENGTHS + 2))})


def test_a_choice_has_one_part_of_an_aspect() -> None:
    with pytest.raises(PlanError, match=r"got parts \['w3\+1', 'w5\+1'\], expected at most one of each"):
        Choice.of(Window(3, 1), Window(5, 1))


def test_layers_and_exactness() -> None:
    plan = make_plan()
    assert plan.layer(1) is plan.layers[0]
    assert plan.layer(0) is None
    assert plan.layer(None) is None
    assert not plan.is_exact
    assert make_plan(layers=(LayerPlan(0, "", (EXACT,)),)).is_exact
    assert plan.max_length == 1024


def test_a_picture_shows_every_layer_and_what_the_plan_says() -> None:
    plan = make_plan()
    assert [[c.label for c in row] for row in grid(plan)] == [["exact", "exact"], ["w256+16 bf16", "exact"]]
    assert heat_map(plan).row_count == 2
    assert "1.50 times as fast as exact" in " ".join(details(plan))


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
