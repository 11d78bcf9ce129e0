"""Documents packed into one row do not see one another, however the borders are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from ..property.test_memory import Largest
from ..support.families import LISTED, models
from ..support.models import assert_same, main_output, pair, tokens
from ..support.versions import needs_tracing

BORDER = 4
POSITIONS = torch.cat([torch.arange(BORDER), torch.arange(11 - BORDER)])[None]
DECODER_NAMES = [
    "gpt2",
    "llama",
    "llama-mqa",
    "mistral-window",
    "qwen2-hybrid",
    "gemma2-softcap",
    "gemma3-hybrid",
    "phi",
    "gpt-neox",
]


def borders() -> dict[str, Any]:
    """What DataCollatorWithFlattening hands over for flash-attn."""
    sums = torch.tensor([0, BORDER, 11], dtype=torch.int32)
    return dict(cu_seq_lens_q=sums, cu_seq_lens_k=sums, max_length_q=7, max_length_k=7)


def one_by_one(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        first, second = model(input_ids=ids[:, :BORDER]), model(input_ids=ids[:, BORDER:])
    return torch.cat([main_output(first), main_output(second)], dim=1)


@pytest.mark.parametrize("name", DECODER_NAMES)
def test_restarting_positions_separate_documents(name: str) -> None:
    stock, ours = pair(name)
    ids = tokens(batch=1)
    with torch.no_grad():
        packed = ours(input_ids=ids, position_ids=POSITIONS, use_cache=False).logits
    assert_same(one_by_one(stock, ids), packed)


@pytest.mark.parametrize("name", DECODER_NAMES)
def test_document_borders_separate_documents_with_a_cache(name: str) -> None:
    stock, ours = pair(name)
    ids = tokens(batch=1)
    with torch.no_grad():
        packed = ours(input_ids=ids, position_ids=POSITIONS, **borders()).logits
    assert_same(one_by_one(stock, ids), packed)


@pytest.mark.parametrize("name", ["bert", "modernbert-local"])
def test_document_borders_separate_documents_in_encoders(name: str) -> None:
    stock, ours = pair(name)
    ids = tokens(batch=1)
    with torch.no_grad():
        packed = main_output(ours(input_ids=ids, position_ids=POSITIONS, **borders()))
    assert_same(one_by_one(stock, ids), packed)


def test_stock_attention_leaks_where_ours_does_not() -> None:
    """The tests above can fail: stock attention reads the other document when borders alone tell it."""
    stock, _ = pair("llama")
    ids = tokens(batch=1)
    expected = one_by_one(stock, ids)
    with torch.no_grad():
        leaked = stock(input_ids=ids, position_ids=POSITIONS, **borders()).logits
    assert float((leaked - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_of_a_collated_batch_equal_those_of_single_documents(name: str) -> None:
    stock, ours = pair(name)
    documents = [tokens(batch=1, length=length, seed=length)[0].tolist() for length in (5, 9, 2)]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator([{"input_ids": document} for document in documents])
    batch.pop("labels")
    loss = ours(**batch, use_cache=False).logits.square().sum()
    weight = ours.get_input_embeddings().weight
    (found,) = torch.autograd.grad(loss, weight)
    expected = torch.zeros_like(weight)
    for document in documents:
        own = stock(input_ids=torch.tensor([document]), use_cache=False).logits.square().sum()
        expected += torch.autograd.grad(own, stock.get_input_embeddings().weight)[0]
    assert_same(expected, found)


def test_packed_documents_in_several_rows_are_refused() -> None:
    _, ours = pair("llama")
    with pytest.raises(ValueError, match="packed documents lie in one batch row, got a batch of 3"):
        ours(input_ids=tokens(), **borders())


def test_positions_and_borders_together_cost_no_mask() -> None:
    """What the collator hands over without a cache: the same borders, told twice."""
    _, ours = pair("llama")
    length = 512
    positions = torch.arange(length // 2).repeat(2)[None]
    sums = torch.tensor([0, length // 2, length], dtype=torch.int32)
    twice = dict(position_ids=positions, cu_seq_lens_q=sums, cu_seq_lens_k=sums, use_cache=False)
    ours.config.max_position_embeddings = length
    with torch.no_grad(), Largest() as seen:
        ours(input_ids=tokens(batch=1, length=length), **twice)
    assert 0 < seen.elements < length * length


@needs_tracing
@pytest.mark.parametrize("family", ["stablelm", "gpt_oss"])
def test_borders_are_read_from_positions_in_a_traced_graph(family: str) -> None:
    _, ours = models(family, LISTED["decoders"][family], AutoModelForCausalLM)
    ids = tokens(batch=1)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = ours(input_ids=ids, position_ids=POSITIONS, use_cache=False).logits
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        actual = compiled(input_ids=ids, position_ids=POSITIONS, use_cache=False).logits
    torch._dynamo.reset()
    assert_same(expected, actual)
