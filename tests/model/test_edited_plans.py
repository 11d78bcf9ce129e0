"""Plan files that somebody edited: `load_plan` believes no verdict below today's limits, `verify` takes no limit."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import adaattn_hf
from adaattn_hf.cli.pictures.grid import details
from adaattn_hf.cli.pictures.headline import headline
from adaattn_hf.eval.demo import demo_model_path, heldout_pages
from adaattn_hf.patches.cache.caches import stored_as
from adaattn_hf.plans.card import card
from adaattn_hf.plans.choices import Choice, Window
from adaattn_hf.plans.export import exported
from adaattn_hf.plans.plan import Plan, PlanError

from ..support.command import adaattn
from ..support.models import fresh_pair, tokens
from ..support.plans import PROVEN, plan_for

INT8: dict[str, Any] = {"stored": "int8", "streaming": False, "share": 0.5}
EDITS: list[tuple[dict[str, Any], str]] = [
    ({"confidence": 0.5}, "the bound is at 50.00 %, below 95 %"),
    ({"confidence": 0.0}, "the bound is at 0.00 %, below 95 %"),
    ({"documents": 1}, "it rests on 1 documents with 4000 tokens, fewer than 2 and 32"),
    ({"tokens": 1}, "it rests on 12 documents with 1 tokens, fewer than 2 and 32"),
    ({"kl": 2e-3}, "the mean KL is 2.00e-3 nats/token, above 1.00e-3"),
    ({"top1": 0.0}, "the likeliest token agrees on 0.00 %, below 90.51 %"),
    ({"retrieval_stock": 0.5, "retrieval_plan": 0.0}, "32 of 32 needles are lost, more than 16"),
    ({"retrieval_stock": 0.5, "retrieval_plan": 0.125, "needles": 16, "needles_lost": 6}, "6 of 8 needles are lost"),
    ({"sentence": "failed: everything"}, "its sentence is 'failed: everything'"),
]
"""Fields of a verdict that says that it passed, and why it is not believed."""


def lettered(**changes: Any) -> tuple[Any, Plan]:
    """A small LLaMA, and a plan of windows for it."""
    model = fresh_pair("llama").ours
    return model, plan_for(model, Choice.of(Window(2)), **changes)


@pytest.mark.parametrize("over", ["plan", "cache"])
@pytest.mark.parametrize(("edit", "says"), EDITS, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_a_verdict_below_todays_limits_is_believed_nowhere(edit: dict[str, Any], says: str, over: str) -> None:
    proof = replace(PROVEN, **edit)
    fields = {"verified": proof} if over == "plan" else {"protocol": {"cache": {**INT8, "verified": asdict(proof)}}}
    model, plan = lettered(**fields)
    with pytest.raises(PlanError, match="contradicts its own verification") as refused:
        adaattn_hf.load_plan(model, plan)
    assert says in str(refused.value)
    model.config.adaattn = {"plan": plan.to_dict()}
    with pytest.raises(PlanError, match="contradicts its own verification"):
        model(input_ids=tokens())
    for text in (headline(plan), " ".join(details(plan)), card(plan, "place")):
        assert "not verified: the plan contradicts its own verification" in text
        assert "passed: perplexity" not in text
    assert exported(plan, "flex")["verified"] is None
    assert stored_as(model, None, None, "model") == ("model", False)
    adaattn_hf.load_plan(model, plan, unverified=True)


@pytest.mark.parametrize(
    ("proof", "says"), [(None, "was never verified on"), ({**asdict(PROVEN), "passed": False}, "failed on")]
)
@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_a_cache_format_is_used_on_a_verification_of_its_own_alone(
    proof: dict[str, Any] | None, says: str, layers: tuple[int, ...]
) -> None:
    model, plan = lettered(layers=layers, protocol={"cache": {**INT8, "verified": proof}})
    with pytest.raises(PlanError, match=f"the plan {says} held-out text over its cache in int8, so it runs only"):
        adaattn_hf.load_plan(model, plan)
    model.config.adaattn = {"plan": plan.to_dict()}
    assert stored_as(model, None, None, "model") == ("model", False)
    good = replace(plan, protocol={"cache": {**INT8, "verified": asdict(PROVEN)}})
    assert stored_as(adaattn_hf.load_plan(model, good), None, None, "model") == ("int8", False)


def test_a_cache_whose_bound_lies_above_the_budget_did_not_pass() -> None:
    with pytest.raises(PlanError, match=r"protocol\.cache\.verified\.passed is true with an upper bound of 9\.0"):
        lettered(protocol={"cache": {**INT8, "verified": asdict(replace(PROVEN, upper=9.0))}})


def test_files_of_before_the_counts_of_needles_are_read() -> None:
    plan = lettered()[1]
    data = plan.to_dict()
    del data["verified"]["needles"], data["verified"]["needles_lost"]
    assert Plan.from_dict(data) == plan
    with pytest.raises(PlanError, match=r"verified\.needles_lost is 9, expected a number that the shares"):
        replace(PROVEN, needles=16, needles_lost=9, retrieval_stock=0.5, retrieval_plan=0.5)


# ---------------------------------------------------------------------- verify
@pytest.fixture(scope="module")
def claim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A text, and a plan that does not keep its budget on it: each key/value head sees one token."""
    place = tmp_path_factory.mktemp("claim")
    (place / "text.txt").write_text("\n\n".join(heldout_pages()[:6]), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(demo_model_path("llama"), attn_implementation="adaattn")
    every = tuple(range(model.config.num_hidden_layers))
    choice = Choice.of(Window(1))
    return place, plan_for(model, choice, layers=every, lengths=(64,), budget=1.65, attention_layers=every)


def judged(claim: tuple[Path, Plan], plan: Plan, place: Path, *words: str) -> tuple[int, dict[str, Any]]:
    (place / "adaattn_plan.json").write_text(plan.to_json(), encoding="utf-8")
    text = claim[0] / "text.txt"
    say = ("--plan", place, "--data", text, "--most-held-out", "4", "--quiet", "--json", *words)
    done = adaattn("verify", demo_model_path("llama"), *say, code=(0, 1))
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain(claim: tuple[Path, Plan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    code, found = judged(claim, claim[1], tmp_path_factory.mktemp("plain"))
    assert code == (0 if found["passed"] else 1)
    return found


LOOSE = {"budget": 9.0, "top1": 0.0, "needles": 1.0, "rounding": 9.0}


@pytest.mark.parametrize(
    "changes",
    [
        *({"verified": replace(PROVEN, **edit)} for edit, _ in EDITS), {"verified": None},
        {"protocol": {"gates": LOOSE}}, {"protocol": {"settings": {"alpha": 0.5, "most_held_out": 2, "haystacks": 0}}},
        {"protocol": {"settings": {"sequences": 30, "joint": 9, "tries": 9, "another": "setting"}}},
        {"protocol": {"scoring": {"mask_share": 0.9, "maskings": 1}, "machine": "x" * 100_000}},
        {"seed": 7}, {"data_fingerprint": "ab" * 32}, {"attention_layers": ()},
        {"verified": replace(PROVEN, tries=9, upper=1.6, predicted_kl=1.0)},
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_no_field_of_the_plan_changes_how_it_is_judged(
    changes: dict[str, Any], claim: tuple[Path, Plan], plain: dict[str, Any], tmp_path: Path
) -> None:
    history = [{"verified": {}, "held_out": {"64": [2, 4]}}]
    (tmp_path / "adaattn_report.json").write_text(json.dumps({"history": history}), encoding="utf-8")
    _, found = judged(claim, replace(claim[1], **changes), tmp_path)
    assert (found["verdicts"], found["limits"]) == (plain["verdicts"], plain["limits"])
    assert len(str(found["differing"])) < 2000


def test_the_limits_are_typed(claim: tuple[Path, Plan], plain: dict[str, Any], tmp_path: Path) -> None:
    _, found = judged(claim, claim[1], tmp_path, "--top1", "99%", "--needles", "1%")
    assert (plain["limits"]["top1"], plain["limits"]["needles"]) == (0.0, None)
    assert (found["limits"]["top1"], found["limits"]["needles"]) == (0.99, 0.01)
    assert "below 99.00 %" in found["verdicts"]["64"]["sentence"]
