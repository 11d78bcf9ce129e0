"""Tensors without data get the answer that stock attention gives, tensors of eight bits a sentence."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, LlamaConfig

import adaattn_hf

NAMES = ("adaattn", "adaattn_sdpa", "adaattn_native", "adaattn_eager")
SMALL: Any = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


assert set(NAMES) < set(adaattn_hf.NAMES)


def called(name: str, *tensors: Any, **keywords: Any) -> Any:
    serve: Any = AttentionInterface._global_mapping[name]
    return serve(nn.Module(), *tensors, None, **keywords)


@pytest.mark.parametrize("name", ["adaattn", "adaattn_sdpa", "adaattn_eager"])
@pytest.mark.parametrize(
    "keywords", [{}, {"dropout": 0.1}, {"softcap": 1.0}, {"is_causal": True}, {"output_attentions": True}],
    ids=["plain", "dropout", "softcap", "causal", "weights"],
)  # fmt: skip
def test_tensors_without_data_have_an_answer_without_data(name: str, keywords: dict[str, Any]) -> None:
    query, key = torch.empty(2, 4, 7, 16, device="meta"), torch.empty(2, 2, 7, 16, device="meta")
    for _ in range(2):
        out, weights = called(name, query, key, key, **keywords)
        assert out.is_meta
        assert out.shape == (2, 7, 4, 16)
        assert (weights is None) == ("output_attentions" not in keywords)


@pytest.mark.parametrize("name", ["adaattn", "adaattn_eager", "adaattn_sdpa"])
@pytest.mark.parametrize(
    ("auto", "config"), [(AutoModelForCausalLM, LlamaConfig(**SMALL)), (AutoModelForMaskedLM, BertConfig(**SMALL))],
    ids=["llama", "bert"],
)  # fmt: skip
def test_models_without_data_run_with_and_without_padding(auto: Any, config: Any, name: str) -> None:
    with torch.device("meta"):
        model = auto.from_config(config, attn_implementation=name)
    ids = torch.zeros(2, 6, dtype=torch.long, device="meta")
    assert model(ids).logits.is_meta
    if name == "adaattn_sdpa":
        with pytest.raises(RuntimeError, match="meta tensors have no padding to read"):
            model(ids, attention_mask=torch.ones_like(ids))
    else:
        assert model(ids, attention_mask=torch.ones_like(ids)).logits.is_meta


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch._mkldnn])  # type: ignore[attr-defined]
@pytest.mark.parametrize("queries", [1, 6])
def test_other_layouts_are_refused_in_words_though_a_dense_call_of_their_shape_was_served(
    name: str, layout: torch.layout, queries: int
) -> None:
    dense = [torch.rand(1, 2, length, 16) for length in (queries, 6, 6)]
    called(name, *dense)
    for index, argument in enumerate(("query", "key", "value")):
        tensors = list(dense)
        tensors[index] = dense[index].to_sparse() if layout is torch.sparse_coo else dense[index].to_mkldnn()
        with pytest.raises(ValueError, match=rf"^{argument}: got a tensor of layout {layout}, expected a dense"):
            called(name, *tensors)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_eight_bits_are_refused_in_words(name: str, dtype: torch.dtype) -> None:
    narrow, wide = torch.zeros(1, 2, 6, 16).to(dtype), torch.zeros(1, 2, 6, 16)
    for tensors, which in (((narrow, narrow, narrow), "query"), ((wide, narrow, narrow), "key")):
        with pytest.raises(
            ValueError, match=rf"^{which}: got {dtype}, expected a floating-point dtype of 16 bits or m"
        ):
            called(name, *tensors)
