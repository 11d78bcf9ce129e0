"""Plans beside what libraries do to models: adapters, sharding, saving, evaluation."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AttentionInterface

import adaattn_hf
from adaattn_hf.plans import store
from adaattn_hf.plans.plan import PlanError
from adaattn_hf.plans.store import remember_tensors

from ..support.choices import make_choice
from ..support.models import fresh_pair, tokens
from ..support.plans import give, plan_for


def planned(**choice: Any) -> Any:
    _, ours = fresh_pair("llama")
    give(ours, make_choice(**choice), layers=(1,))
    return ours


def test_tensor_parallelism_is_refused_by_name() -> None:
    ours = planned(kind="window", window=2)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        projection = ours.model.layers[1].self_attn.q_proj
        projection.weight = torch.nn.Parameter(distribute_tensor(projection.weight, mesh, [Shard(0)]))
        with pytest.raises(PlanError, match=r"spread over 1 devices \(tensor parallelism\)"):
            adaattn_hf.load_plan(ours)
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def test_sequence_parallelism_by_heads_is_exact_and_refused_under_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ulysses hands a process all tokens of some heads, without a mask, and nothing says which heads they are."""
    whole: Any = AttentionInterface._global_mapping["adaattn"]

    def shared_out(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        halves = zip(*(tensor.chunk(2, dim=1) for tensor in (query, key, value)), strict=True)
        return torch.cat([whole(module, *half, None, **kwargs)[0] for half in halves], dim=2), None

    _, ours = fresh_pair("llama")
    right = ours(input_ids=tokens()).logits
    monkeypatch.setitem(AttentionInterface._global_mapping, "adaattn", shared_out)
    torch.testing.assert_close(ours(input_ids=tokens()).logits, right)
    give(ours, make_choice(kind="window", window=2))
    for rows in (tokens(), tokens(1, 1)):
        with pytest.raises(ValueError, match=r"made for 2 key/value heads, got keys with 1; .*\(Ulysses\).*tp_plan"):
            ours(input_ids=rows)


@torch.no_grad()
@pytest.mark.parametrize("configured", [True, False])
def test_saving_a_model_takes_the_tensors_of_its_plan_along(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = planned(precision="int8")
    plan = adaattn_hf.plan_of(ours)
    assert plan is not None
    heads = ours.config.num_key_value_heads
    name = remember_tensors({"layers.1.key_mean": torch.randn(heads, ours.config.head_dim)})
    adaattn_hf.load_plan(ours, replace(plan, tensors=name))
    right = ours(input_ids=tokens()).logits
    if configured:
        adaattn_hf.configure(ours, "fast")
    ours.save_pretrained(tmp_path / "copy")
    monkeypatch.setattr(store, "_tensors", {})  # another process
    again = type(ours).from_pretrained(tmp_path / "copy", attn_implementation="adaattn").eval()
    adaattn_hf.load_plan(again)
    torch.testing.assert_close(again(input_ids=tokens()).logits, right)
    monkeypatch.setattr(store, "_tensors", {})
    again.config.adaattn["tensors"] = "AAAA" + again.config.adaattn["tensors"][4:]
    third = type(ours).from_pretrained(tmp_path / "copy", attn_implementation="adaattn", config=again.config).eval()
    with pytest.raises(PlanError, match=r"has hash"):
        adaattn_hf.load_plan(third)


def test_the_tensors_of_plans_do_not_pile_up() -> None:
    _, model = fresh_pair("llama")
    plan = plan_for(model, make_choice(precision="int8"))
    first = torch.full((2, 4), -1.0)
    gone, oldest = weakref.ref(first), replace(plan, tensors=remember_tensors({"layers.1.key_mean": first}))
    del first
    assert oldest.tensor_bytes() is not None
    for number in range(100):
        tensors = {"layers.1.key_mean": torch.full((2, 4), float(number))}
        newest = replace(plan, tensors=remember_tensors(tensors))
    gc.collect()
    assert gone() is None
    assert newest.tensor_bytes() is not None
    with pytest.raises(PlanError, match="copy it beside the weights"):
        oldest.tensor_bytes()


@torch.no_grad()
def test_weights_written_past_their_counter_are_compared_when_the_plan_is_loaded_again() -> None:
    ours = planned(kind="window", window=2)
    ours(input_ids=tokens())
    ours.model.layers[1].self_attn.k_proj.weight.data.add_(1.0)
    with pytest.raises(PlanError, match="not those that the plan"):
        adaattn_hf.load_plan(ours)


@torch.no_grad()
@pytest.mark.parametrize("plan_first", [True, False])
def test_offloaded_weights_are_checked_where_they_are_kept(plan_first: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    right = planned(kind="window", window=2)(input_ids=tokens()).logits
    ours = planned(kind="window", window=2)
    if plan_first:
        adaattn_hf.load_plan(ours)
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    if not plan_first:
        adaattn_hf.load_plan(ours)
    for _ in range(2):
        torch.testing.assert_close(ours(input_ids=tokens()).logits, right, rtol=0, atol=0)
    ours.model.layers[1].self_attn.k_proj._hf_hook.weights_map["weight"].add_(0.1)
    with pytest.raises(PlanError, match="layer 1 are not those that the plan"):
        ours(input_ids=tokens())


def test_weights_without_data_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"embed_tokens\.weight has no data \(device 'meta'\)"):
        adaattn_hf.load_plan(planned(kind="window", window=2).to("meta"))
