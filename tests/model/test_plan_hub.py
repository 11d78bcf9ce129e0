"""A plan given away: written to a directory, pushed to the Hub, and taken from there by all that takes a plan."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

import adaattn_hf
from adaattn_hf import Plan, PlanError
from adaattn_hf.patches.checkpoint import give_plan
from adaattn_hf.plans import store
from adaattn_hf.plans.card import card

from ..support.choices import make_choice
from ..support.models import fresh_pair, logits
from ..support.plans import plan_for

REPOSITORY = "somebody/llama-plan"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub in a directory, by what the library's public functions are asked."""
    place = tmp_path / "hub"

    def download(repo_id: str, filename: str) -> str:
        if not (place / repo_id).is_dir():
            raise HfHubHTTPError(f"404: no repository {repo_id}", response=SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
        if not (place / repo_id / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(place / repo_id / filename)

    def create(_: Any, repo_id: str, **asked: Any) -> None:
        assert asked == {"private": True, "exist_ok": True}
        (place / repo_id).mkdir(parents=True, exist_ok=True)

    def upload(_: Any, *, repo_id: str, folder_path: str, ignore_patterns: Any, **__: Any) -> Any:
        ignored = shutil.ignore_patterns(*(ignore_patterns or ()))
        shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True, ignore=ignored)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    api = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(api, "create_repo", create)
    monkeypatch.setattr(api, "upload_folder", upload)
    monkeypatch.setattr(api, "file_exists", lambda _, repo, name: (place / repo / name).is_file())
    return place


def rounded() -> tuple[Any, Plan]:
    ours = fresh_pair("llama").ours
    plan = plan_for(ours, make_choice(precision="int8"), layers=(1,))
    means = torch.randn(ours.config.num_key_value_heads, ours.config.head_dim)
    return ours, replace(plan, tensors=store.remember_tensors({"layers.1.key_mean": means}))


def test_a_plan_travels_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plan = rounded()
    assert adaattn_hf.load_plan(ours, plan) is ours
    assert adaattn_hf.plan_of(ours) == plan
    right = logits(ours, 32)
    plan.save_pretrained(tmp_path / "plan")
    monkeypatch.setattr(store, "_tensors", {})  # another process
    assert Plan.from_pretrained(tmp_path / "plan") == plan
    twin = fresh_pair("llama").ours
    adaattn_hf.load_plan(twin, str(tmp_path / "plan"))
    assert torch.equal(logits(twin, 32), right)
    (tmp_path / "plan" / store.TENSORS_FILE).unlink()
    monkeypatch.setattr(store, "_tensors", {})
    with pytest.raises(PlanError, match=r"needs adaattn_plan\.safetensors"):
        adaattn_hf.load_plan(fresh_pair("llama").ours, tmp_path / "plan")
    with pytest.raises(PlanError, match=r"needs adaattn_plan\.safetensors"):
        plan.save_pretrained(tmp_path / "again")


def test_what_is_no_plan_and_no_place_is_refused() -> None:
    with pytest.raises(TypeError, match=r"plan: got dict, expected a Plan, its file .*Plan\.from_dict"):
        adaattn_hf.load_plan(fresh_pair("llama").ours, {"format": 2})  # type: ignore[arg-type]


def test_the_card_says_what_was_proven_and_how_to_look_again(tmp_path: Path) -> None:
    _, plan = rounded()
    replace(plan, protocol={"model": "somebody/llama"}).save_pretrained(tmp_path)
    written = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert plan.verified is not None
    for words in (
        'base_model: "somebody/llama"', plan.verified.sentence, f"up to {plan.max_length:,} tokens",
        f"load_plan(model, '{tmp_path}')", f"adaattn eval somebody/llama --plan {tmp_path} --dtype float32",
    ):  # fmt: skip
        assert words in written
    masked = replace(plan, protocol={"scoring": {"mask_share": 0.15}})
    assert "AutoModelForMaskedLM" in card(masked, "me/plan")
    assert "AutoModelForCausalLM" in written
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    plan.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"


def test_all_that_take_a_plan_take_it_from_the_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, plan = rounded()
    with adaattn_hf.use_plan(ours, plan):
        right = logits(ours, 32)
    exact = logits(ours, 32)
    assert plan.push_to_hub(REPOSITORY, private=True) == f"https://hub/{REPOSITORY}/commit/1"
    assert REPOSITORY in (hub / REPOSITORY / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(store, "_tensors", {})
    assert Plan.from_pretrained(REPOSITORY) == plan
    with adaattn_hf.use_plan(ours, REPOSITORY):
        assert torch.equal(logits(ours, 32), right)
    assert adaattn_hf.explain(ours, plan=REPOSITORY).layers == adaattn_hf.explain(ours, plan=plan).layers
    with adaattn_hf.record(ours, maps=((1, 0),), against=REPOSITORY) as seen:
        assert torch.equal(logits(ours, 32), exact)
    assert float(seen.errors[1, 0].abs().max()) > 0
    give_plan(ours, REPOSITORY)
    assert torch.equal(logits(ours, 32), right)
    adaattn_hf.load_plan(ours, REPOSITORY)
    assert torch.equal(logits(ours, 32), right)


def test_a_models_card_stays_and_what_is_not_there_is_said(hub: Path) -> None:
    _, plan = rounded()
    model = hub / "somebody" / "llama"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(PlanError, match="carries no plan"):
        Plan.from_pretrained("somebody/llama")
    (model / "README.md").write_text("a model", encoding="utf-8")
    plan.push_to_hub("somebody/llama", private=True)
    assert (model / "README.md").read_text(encoding="utf-8") == "a model"
    assert Plan.from_pretrained("somebody/llama") == plan
    (model / store.PLAN_FILE).unlink()
    (model / "config.json").unlink()
    with pytest.raises(PlanError, match=r"somebody/llama does not exist; expected a plan, or a directory or rep"):
        Plan.from_pretrained("somebody/llama")
    with pytest.raises(PlanError, match=r"somebody/other: its adaattn_plan\.json cannot be had .*404"):
        Plan.from_pretrained("somebody/other")
