"""The guide's recipe for flex_attention computes what the plan computes."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.choices import EXACT
from adaattn_hf.plans.tensors import LayerTensors

from ..support.choices import make_choice
from ..support.models import fresh_pair
from ..support.pages import blocks
from ..support.plans import plan_for
from ..support.source_tree import ROOT

LENGTH, HEADS = 96, 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layer", [0, 1])
def test_flex_attention_computes_what_the_plan_does(layer: int) -> None:
    page = (ROOT / "docs" / "guides" / "other-engines.md").read_text(encoding="utf-8")
    (code,) = (block.code for block in blocks(page) if block.language == "python")
    recipe: dict[str, Any] = {}
    exec(code, recipe)
    mixed = {0: (make_choice("window", window=16, sinks=4), EXACT), 1: (make_choice("window", window=8),) * 2}
    plan, longer = (plan_for(fresh_pair("llama").ours, mixed, lengths=(length,)) for length in (64, LENGTH))
    rules = plan.layer(layer)
    assert rules is not None
    torch.manual_seed(layer)
    query = torch.randn(1, HEADS, LENGTH, 16)
    key, value = torch.randn(2, 1, 2, LENGTH, 16)
    call = AttentionCall(query, key, value, MaskStructure(1, LENGTH, LENGTH, causal=True), 0.25)
    right = execute.attend(BoundLayer(rules, LayerTensors(), plan.max_length), call).out.transpose(1, 2)

    def by_recipe(plan: Any) -> Any:
        seen = create_block_mask(recipe["mask_of"](plan, layer, HEADS), None, HEADS, LENGTH, LENGTH, device="cpu")
        return flex_attention(query, key, value, block_mask=seen, enable_gqa=True)

    torch.testing.assert_close(by_recipe(plan), right)
    assert not torch.allclose(by_recipe(longer), right, atol=1e-3), "rows behind the lengths are another function"
