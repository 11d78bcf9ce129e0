"""Our names in Transformers' registries: put in, taken out, nothing of Transformers touched."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2Config
from transformers.masking_utils import AttentionMaskInterface

import adaattn_hf
from adaattn_hf.backends.select import BACKENDS, may_run_here

from ..support.names import registered


@pytest.fixture(autouse=True)
def names_come_back() -> Iterator[None]:
    with registered():
        yield


def ours(interface: type) -> set[str]:
    names = interface._global_mapping  # type: ignore[attr-defined]
    return {name for name in names if name.startswith("adaattn") and "|" not in name}  # the engine's have a sign


def test_transformers_server_takes_no_registered_name() -> None:
    """What the guide on CPU servers says; should it take one, the guide can be simpler."""
    manager = pytest.importorskip("transformers.cli.serving.model_manager").ModelManager
    with pytest.raises(ValueError, match="hub kernel"):
        manager(attn_implementation="adaattn", device="cpu")


def test_a_name_for_every_backend_in_both_registries() -> None:
    every = {"adaattn", *(f"adaattn_{name}" for name in BACKENDS)}
    assert set(adaattn_hf.NAMES) == every
    here = {"adaattn", *(f"adaattn_{name}" for name in BACKENDS if may_run_here(name))}
    assert {"adaattn_native", "adaattn_sdpa", "adaattn_eager"} < here
    assert ours(AttentionInterface) == ours(AttentionMaskInterface) == here
    adaattn_hf.register(impossible=True)
    assert ours(AttentionInterface) == ours(AttentionMaskInterface) == every
    # Transformers takes every name with `flash` in it for flash-attn and drops masks for it
    assert not [name for name in adaattn_hf.NAMES if "flash" in name]


def test_registering_twice_changes_nothing_of_transformers() -> None:
    before = dict(AttentionInterface._global_mapping)
    adaattn_hf.register()
    after = dict(AttentionInterface._global_mapping)
    assert before.keys() == after.keys()
    stock = [name for name in before if "adaattn" not in name]
    assert len(stock) > 3
    assert all(before[name] is after[name] for name in stock)


def test_unregistering_takes_all_names_out_and_they_can_come_back() -> None:
    config = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2)
    adaattn_hf.unregister()
    assert ours(AttentionInterface) == ours(AttentionMaskInterface) == set()
    named = {name for name in AttentionInterface._global_mapping if "adaattn" in name}
    assert not {name for name in named if not name.startswith("hub_")}  # those are of Transformers' loader
    with pytest.raises(ValueError, match="adaattn"):
        AutoModelForCausalLM.from_config(config, attn_implementation="adaattn")
    adaattn_hf.unregister()
    adaattn_hf.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="adaattn")
    assert model(input_ids=torch.arange(4)[None]).logits.shape == (1, 4, 8)
