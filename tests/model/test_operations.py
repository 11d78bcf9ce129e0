"""What an attention call makes torch do: no copy and no matrix of scores that stock attention does not make."""

from collections import Counter
from typing import Any

import pytest
import torch

from ..support.models import fresh_pair, tokens
from ..support.operators import NamedOperators

COPIES = ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::contiguous")
LENGTH = 90
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


def operations(model: Any, padded: bool) -> Counter[str]:
    """Operations of one pass behind another, which has found out what there was to find."""
    ids = tokens(batch=2, length=LENGTH)
    mask = torch.ones_like(ids)
    mask[1, : LENGTH // 3 if padded else 0] = 0
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        with NamedOperators() as noted:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    return Counter(noted.names)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("implementation", ["adaattn", "adaattn_sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_copy_and_no_product_that_stock_does_not_make(name: str, implementation: str, padded: bool) -> None:
    stock, ours = fresh_pair(name)
    stock.set_attn_implementation("sdpa")
    ours.set_attn_implementation(implementation)
    expected, seen = operations(stock.eval(), padded), operations(ours.eval(), padded)
    assert {op: seen[op] for op in COPIES if seen[op] > expected[op]} == {}
    assert seen["aten::bmm"] == expected["aten::bmm"]  # no scores outside of a kernel
    layers = ours.config.num_hidden_layers
    assert expected[FUSED] == layers
    if implementation == "adaattn_sdpa" and not padded:
        assert seen[FUSED] == layers


def test_the_count_notices_a_copy_and_a_score_matrix() -> None:
    stock, ours = fresh_pair("llama")
    ours.set_attn_implementation("adaattn_eager")
    stock.set_attn_implementation("sdpa")
    expected, seen = operations(stock.eval(), False), operations(ours.eval(), False)
    assert seen[FUSED] == 0
    assert any(seen[op] > expected[op] for op in COPIES) or seen["aten::bmm"] > expected["aten::bmm"]
