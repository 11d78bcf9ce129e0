"""Plan files that somebody edited: `load_plan` believes no verdict below today's limits, `verify` takes no limit."""

import hashlib
import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

import adaattn_hf
from adaattn_cli.pictures.headline import details, headline
from adaattn_hf.eval.demo import demo_model_path, heldout_pages
from adaattn_hf.patches.cache.caches import stored_as
from adaattn_hf.plans.card import card
from adaattn_hf.plans.choices import Choice, Rank, Window
from adaattn_hf.plans.plan import Plan, PlanError

from ..support.command import adaattn
from ..support.models import fresh_pair
from ..support.plans import PROVEN, plan_for

INT8: dict[str, Any] = {"stored": "int8", "streaming": False, "share": 0.5}
EDITS: list[tuple[dict[str, Any], str]] = [
    ({"confidence": 0.5}, "the bound is at 50.00 %, below 95 %"),
    ({"confidence": 0.0}, "the bound is at 0.00 %, below 95 %"),
    ({"documents": 1}, "it rests on 1 documents with 4000 tokens, fewer than 2 and 32"),
    ({"tokens": 1}, "it rests on 12 documents with 1 tokens, fewer than 2 and 32"),
    ({"kl": 2e-3}, "predictions differ too much (mean KL 2.00e-3 nats/token, above 1.00e-3"),
    ({"top1": 0.0}, "the likeliest token agrees on 0.00 %, below 90.51 %"),
    ({"retrieval_stock": 0.5, "retrieval_plan": 0.0}, "32 of 32 needles are lost, more than 16"),
    ({"retrieval_stock": 0.5, "retrieval_plan": 0.125, "needles": 16, "needles_lost": 6}, "6 of 8 needles are lost"),
    ({"sentence": "failed: everything"}, "its sentence is 'failed: everything'"),
]
"""Fields of a verdict that says that it passed, and why it is not believed."""


def lettered(**changes: Any) -> tuple[Any, Plan]:
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
        adaattn_hf.load_plan(model)
    for text in (headline(plan), " ".join(details(plan)), card(plan, "place")):
        assert "not verified: the plan contradicts its own verification" in text
        assert "passed: perplexity" not in text
    adaattn_hf.load_plan(model, plan, unverified=True)
    assert stored_as(model, None, None, "model") == ("model", False)


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
    adaattn_hf.load_plan(model, plan, unverified=True)
    assert stored_as(model, None, None, "model") == ("model", False)
    good = replace(plan, protocol={"cache": {**INT8, "verified": asdict(PROVEN)}})
    assert stored_as(adaattn_hf.load_plan(model, good), None, None, "model") == ("int8", False)


def test_files_of_before_the_counts_of_needles_are_read() -> None:
    plan = lettered()[1]
    data = plan.to_dict()
    del data["verified"]["needles"], data["verified"]["needles_lost"]
    assert Plan.from_dict(data) == plan
    with pytest.raises(PlanError, match="needles_lost is 9, expected a number that the shares"):
        replace(PROVEN, needles=16, needles_lost=9, retrieval_stock=0.5, retrieval_plan=0.5)


_NAMES = [f"{kind}_basis.{head}" for kind in ("query", "key") for head in (0, 1)]
BASES = {f"layers.{layer}.{name}": torch.eye(8)[:, :2].contiguous() for layer in (0, 1) for name in _NAMES}


def saved_with(place: Path, data: bytes) -> Any:
    """A small LLaMA, beside a plan of ranks whose file of tensors holds this and has the hash that the plan names."""
    model = fresh_pair("llama").ours
    plan = plan_for(model, Choice.of(Rank(2)), tensors=hashlib.sha256(data).hexdigest())
    (place / "adaattn_plan.json").write_text(plan.to_json(), encoding="utf-8")
    (place / "adaattn_plan.safetensors").write_bytes(data)
    return model


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"layers.0.query_basis.x": torch.zeros(8, 2)}, "holds 'layers.0.query_basis.x', expected names such as"),
        ({"another": torch.zeros(8, 2)}, "holds 'another', expected names such as layers.0.key_mean"),
        ({"layers.1.key_basis.0": torch.full((8, 2), torch.nan)}, "not finite, expected finite numbers"),
        ({"layers.1.key_basis.0": torch.full((8, 2), -torch.inf)}, "not finite, expected finite"),
        ({"layers.0.key_mean": torch.zeros(2, 8, dtype=torch.int64)}, r"key_mean is torch\.int64 or not finite"),
        ({"layers.0.query_basis.1": torch.zeros(8, 1)}, r"query_basis of head 1 is torch\.float32 \(8, 1\)"),
    ],
    ids=str,
)
def test_tensors_are_not_trusted_though_their_hash_matches(changes: Any, says: str | None, tmp_path: Path) -> None:
    model = saved_with(tmp_path, save({**BASES, **changes}))
    with pytest.raises(PlanError, match=says) if says else nullcontext():
        adaattn_hf.load_plan(model, tmp_path)


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xff" * 64, save(BASES)[:-8], save(BASES) + b"more"])
def test_a_file_that_holds_no_tensors_is_a_sentence(data: bytes, tmp_path: Path) -> None:
    model = saved_with(tmp_path, data)
    with pytest.raises(PlanError, match=r"adaattn_plan\.safetensors is no safetensors file .*; calibrate again"):
        adaattn_hf.load_plan(model, tmp_path)


def test_a_file_larger_than_any_plans_is_not_read(tmp_path: Path) -> None:
    model = saved_with(tmp_path, b"")
    with (tmp_path / "adaattn_plan.safetensors").open("wb") as file:
        file.truncate(40 << 30)  # sparse: it takes no room
    with pytest.raises(PlanError, match=f"has {40 << 30} bytes, expected a plan of at most"):
        adaattn_hf.load_plan(model, tmp_path)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_choices_for_other_numbers_of_heads_are_refused_at_load(number: int) -> None:
    model, plan = lettered()
    wrong = replace(plan, layers=tuple(replace(layer, choices=layer.choices[:1] * number) for layer in plan.layers))
    with pytest.raises(PlanError, match=f"made for {number} key/value heads, the model has 2; give the plan of this"):
        adaattn_hf.load_plan(model, wrong)


def test_equal_plans_have_equal_hashes() -> None:
    plan = lettered()[1]
    assert len({plan, Plan.from_json(plan.to_json()), replace(plan, budget=1.0)}) == 2


@pytest.mark.parametrize("key", ["budget", "stored"])
def test_a_key_that_comes_twice_is_refused(key: str) -> None:
    text = lettered(protocol={"cache": INT8})[1].to_json()
    line = next(one for one in text.splitlines() if f'"{key}"' in one)
    with pytest.raises(PlanError, match=f"the plan is not JSON: its key '{key}' comes twice in one object"):
        Plan.from_json(text.replace(line, f"{line.rstrip(',')},\n{line}"))


@pytest.mark.parametrize("changes", [
    {"model_type": "x" * 100_000}, {"weight_hash": "y" * 100_000}, {"dtype": ["z"] * 100_000}, {"k" * 100_000: 1},
    {"layers": [{"layer": 0, "weights": "w" * 100_000, "choices": []}]}, {"attention_layers": [1, 0] * 2000},
    {"protocol": {"cache": "c" * 100_000}}, {"format": "f" * 100_000}, {"lengths": list(range(1000, 0, -1))},
], ids=lambda changes: f"{next(iter(changes)):.20}")  # fmt: skip
def test_long_values_are_not_echoed(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.from_dict({**lettered()[1].to_dict(), **changes})
    assert len(str(refused.value)) < 800


Claim = tuple[Path, Plan, dict[str, Any]]


def judged(text: Path, plan: Plan, place: Path, *words: str) -> dict[str, Any]:
    (place / "adaattn_plan.json").write_text(plan.to_json(), encoding="utf-8")
    say = ("--plan", place, "--data", text, "--held-out", "4", "--quiet", "--json", *words)
    return dict(json.loads(adaattn("verify", demo_model_path("llama"), *say, code=1).stdout))


@pytest.fixture(scope="module")
def claim(tmp_path_factory: pytest.TempPathFactory) -> Claim:
    """A text, a plan that does not keep its budget on it, since each head sees one token, and how it is judged."""
    place = tmp_path_factory.mktemp("claim")
    (place / "text.txt").write_text("\n\n".join(heldout_pages()[:6]), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(demo_model_path("llama"), attn_implementation="adaattn")
    every = tuple(range(model.config.num_hidden_layers))
    plan = plan_for(model, Choice.of(Window(1)), every, (64,), budget=0.01, attention_layers=every)
    return place / "text.txt", plan, judged(place / "text.txt", plan, place)


@pytest.mark.parametrize("changes", [
    *({"verified": replace(PROVEN, **edit)} for edit, _ in EDITS), {"verified": None},
    {"protocol": {"gates": {"budget": 9.0, "top1": 0.0, "needles": 1.0, "rounding": 9.0}}},
    {"protocol": {"settings": {"alpha": 0.5, "held_out": 2, "haystacks": 0, "another": "one"}}},
    {"protocol": {"settings": {"sequences": 30, "joint": 9}, "machine": "x" * 100_000}},
    {"protocol": {"scoring": {"mask_share": 0.9, "maskings": 1}}}, {"verified": replace(PROVEN, tries=9)},
    {"seed": 7}, {"data_fingerprint": "ab" * 32}, {"attention_layers": ()},
], ids=lambda value: str(value)[:60])  # fmt: skip
def test_no_field_of_the_plan_changes_how_it_is_judged(changes: dict[str, Any], claim: Claim, tmp_path: Path) -> None:
    history = [{"verified": {}, "held_out": {"64": [2, 4]}}]
    (tmp_path / "adaattn_report.json").write_text(json.dumps({"history": history}), encoding="utf-8")
    text, plan, plain = claim
    found = judged(text, replace(plan, **changes), tmp_path)
    assert found["verdicts"]["64"]["sentence"].startswith("failed: the perplexity may rise by")
    assert (found["verdicts"], found["limits"]) == (plain["verdicts"], plain["limits"])
    assert len(str(found["differing"])) < 2000


def test_the_limits_are_typed(claim: Claim, tmp_path: Path) -> None:
    found = judged(*claim[:2], tmp_path, "--top1", "99%", "--needles", "1%")
    assert (found["limits"]["top1"], found["limits"]["needles"], claim[2]["limits"]["needles"]) == (0.99, 0.01, None)
    assert "below 99.00 %" in found["verdicts"]["64"]["sentence"]
    assert "below 70.00 %" in claim[2]["verdicts"]["64"]["sentence"]
