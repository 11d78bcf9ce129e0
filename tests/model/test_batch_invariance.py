"""Batch invariance: no row depends on who shares its call, in its bits or in the precision that it is computed in."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

import adaattn_hf
from adaattn_hf.backends.native.library import library
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.plans.choices import Choice, Precision, Window

from ..support.models import fresh_pair, tokens
from ..support.plans import plan_for
from .test_batching import one_by_one, together

SHAPES = {"MiniLM": (12, 12, 32, False), "BERT-base": (12, 12, 64, False), "SmolLM2-135M": (9, 3, 64, True)}
"""Query heads, key/value heads, channels of a head, whether attention is causal."""
LENGTHS = (1, 7, 16, 129, 300, 1500)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def attend(causal: bool, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    module: Any = torch.nn.Module()
    module.is_causal = causal
    function: Any = AttentionInterface._global_mapping["adaattn"]
    out: Tensor = function(module, query, key, value, mask, **more)[0]
    return out


@pytest.mark.skipif(library() is None, reason="torch's kernels promise nothing")
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_gives_a_row_the_bits_that_it_has_alone(shape: str, dtype: torch.dtype) -> None:
    heads, kv_heads, channels, causal = SHAPES[shape]
    longest, count = max(LENGTHS), len(LENGTHS)
    given = [torch.randn(count, h, longest, channels).to(dtype) for h in (heads, kv_heads, kv_heads)]
    rows = [[t[i : i + 1, :, longest - n :].contiguous() for t in given] for i, n in enumerate(LENGTHS)]
    alone = [attend(causal, *row)[0] for row in rows]
    packed = [torch.cat(parts, 2) for parts in zip(*rows, strict=True)]
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    documents = attend(causal, *packed, cu_seq_lens_q=borders, cu_seq_lens_k=borders)[0].split(LENGTHS)
    assert all(map(torch.equal, documents, alone))
    batch = attend(causal, *given)
    assert all(torch.equal(batch[i], attend(causal, *(t[i : i + 1] for t in given))[0]) for i in range(count))
    if causal:  # as generation pads
        mask = torch.stack([torch.arange(longest) >= longest - n for n in LENGTHS]).long()
        prompts = attend(True, *given, mask)
        steps = attend(True, given[0][:, :, -1:], *given[1:], mask)
        for row, step, own, n, one in zip(prompts, steps, alone, LENGTHS, rows, strict=True):
            assert torch.equal(row[longest - n :], own)
            assert torch.equal(step, attend(True, one[0][:, :, -1:], *one[1:])[0])


PRECISIONS = [Choice.of(Precision("int8")), Choice.of(Precision("bf16")), Choice.of(Window(4, 1), Precision("int8"))]


@pytest.mark.parametrize("choice", PRECISIONS, ids=lambda choice: choice.label)
@pytest.mark.parametrize("lengths", [(10, 8), (15, 16, 17, 4), (3, 40, 9)])
@pytest.mark.parametrize("name", ["llama", "bert", "mistral-window"])
def test_a_rows_precision_does_not_depend_on_who_shares_the_call(
    name: str, lengths: tuple[int, ...], choice: Choice
) -> None:
    _, model = fresh_pair(name)
    load_plan(model, plan_for(model, choice), unverified=True)
    ids, longest = tokens(len(lengths), max(lengths)), max(lengths)
    right = torch.stack([torch.arange(longest) < n for n in lengths]).long()
    with torch.no_grad():
        alone = torch.cat([model(ids[i : i + 1, :n])[0][0] for i, n in enumerate(lengths)])
        torch.testing.assert_close(model(ids, attention_mask=right)[0][right.bool()], alone)
        if name != "bert":
            left, places = right.flip(1), (right.flip(1).cumsum(1) - 1).clamp_min(0)
            moved = torch.stack([row.roll(longest - n) for row, n in zip(ids, lengths, strict=True)])
            found = model(moved, attention_mask=left, position_ids=places)[0]
            torch.testing.assert_close(found[left.bool()], alone)
        prepared = adaattn_hf.prepare(model)(ids, attention_mask=right)[0]
    torch.testing.assert_close(prepared[right.bool()], alone)


@pytest.mark.filterwarnings("ignore")
def test_requests_under_int8_are_rounded_as_alone() -> None:
    _, model = fresh_pair("llama")
    load_plan(model, plan_for(model, PRECISIONS[0]), unverified=True)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (4, 2, 7, 33, 20, 9, 10, 11)]
    with adaattn_hf.continuous_batching(model):
        found = together(model, prompts, max_batch_tokens=256)
    assert found == one_by_one(model, prompts)


def test_steps_that_a_plan_leaves_exact_are_so_in_company() -> None:
    _, model = fresh_pair("llama")
    load_plan(model, plan_for(model, Choice.of(Window(4, 1)), protocol={"decode": "exact"}), unverified=True)
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, 12:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[:1, :12], model(ids[:1, :12]).logits)
