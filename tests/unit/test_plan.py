"""The plan file: byte-stable, and nothing unknown or out of range gets in."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_cli.pictures.grid import details, grid, heat_map
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
