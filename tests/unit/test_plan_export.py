"""A plan for flex_attention computes what the plan computes; forms that would not are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.errors import UsageError
from adaattn_hf.plans import execute
from adaattn_hf.plans.choices import EXACT
from adaattn_hf.plans.export import REFUSED, exported
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.tensors import LayerTensors

from ..support.choices import make_choice
from ..support.command import adaattn
from ..support.models import fresh_pair
from ..support.pages import blocks
from ..support.plans import plan_for
from ..support.source_tree import ROOT

LENGTH, HEADS = 96, 4


@pytest.fixture(scope="module")
def plan() -> Plan:
    mixed = {0: (make_choice("window", window=16, sinks=4), EXACT), 1: (make_choice("window", window=8),) * 2}
    return plan_for(fresh_pair("llama").ours, mixed, lengths=(64,))


def mask_of_the_page(data: dict[str, Any], layer: int) -> Any:
    """The function that the guide shows, over exported data."""
    page = (ROOT / "docs" / "guides" / "other-engines.md").read_text(encoding="utf-8")
    (code,) = (block.code for block in blocks(page) if block.language == "python")
    names: dict[str, Any] = {}
    exec(code, names)
    names["exported"].clear()
    names["exported"].update(data)
    return names["mask_of"](layer, HEADS)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layer", [0, 1])
def test_flex_attention_computes_what_the_plan_does(layer: int, plan: Plan) -> None:
    data = json.loads(json.dumps(exported(plan, "flex")))
    torch.manual_seed(layer)
    query = torch.randn(1, HEADS, LENGTH, 16)
    key, value = torch.randn(2, 1, 2, LENGTH, 16)
    own = plan.layer(layer)
    assert own is not None
    request = AttentionRequest(query, key, value, CallStructure(1, LENGTH, LENGTH, causal=True), 0.25)
    right: Tensor = execute.attend(Program(own, LayerTensors(), plan.max_length), request).out.transpose(1, 2)
    seen = create_block_mask(mask_of_the_page(data, layer), None, HEADS, LENGTH, LENGTH, device="cpu")
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=seen, enable_gqa=True), right)
    longer = {**data, "max_length": LENGTH}  # the guard can fail: rows behind the lengths are another function
    wrong = create_block_mask(mask_of_the_page(longer, layer), None, HEADS, LENGTH, LENGTH, device="cpu")
    assert not torch.allclose(flex_attention(query, key, value, block_mask=wrong, enable_gqa=True), right, atol=1e-3)


@pytest.mark.parametrize("form", REFUSED)
def test_other_forms_are_refused_with_the_reason(form: str, plan: Plan) -> None:
    with pytest.raises(UsageError, match=f"to: got {form}, expected flex: .*run the plan under Transformers"):
        exported(plan, form)
    assert f"`{form}`" in (ROOT / "docs/guides/other-engines.md").read_text()


def test_what_the_form_cannot_say_is_refused(plan: Plan) -> None:
    model = fresh_pair("llama").ours
    with pytest.raises(PlanError, match=r"layer 0 has 'w8[+]0 bf16', expected windows alone"):
        exported(plan_for(model, make_choice("window", window=8, precision="bf16")), "flex")
    for changes in ({"configuration": {"sliding_window": 8}}, {"protocol": {"scoring": {"mask_share": 0.15}}}):
        with pytest.raises(PlanError, match="looks both ways or has windows of its own"):
            exported(replace(plan, **changes), "flex")


def test_the_command_writes_the_file(plan: Plan, tmp_path: Path) -> None:
    plan.save_pretrained(tmp_path)
    words = ["plan", "export", str(tmp_path), "--output", str(tmp_path / "windows.json"), "--to"]
    adaattn(*words, "flex")
    assert json.loads((tmp_path / "windows.json").read_text()) == exported(plan, "flex")
    for form, said in (("vllm", "no first tokens"), ("flx", "flex")):
        adaattn(*words, form, code=2, says=said)
