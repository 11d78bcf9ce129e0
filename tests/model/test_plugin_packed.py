"""Documents packed into one row do not see one another, however the borders are told."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, masking_utils

from adaattn_hf.patches.models.cache_keyword import with_cache
from adaattn_hf.patches.prepare import prepare

from ..support.families import LISTED, models, sharing
from ..support.models import Pair, answers, assert_same, pair, tokens
from ..support.operators import Largest
from ..support.versions import needs_tracing

BORDER = 4
POSITIONS = torch.cat([torch.arange(BORDER), torch.arange(11 - BORDER)])[None]


def borders() -> dict[str, Any]:
    """What DataCollatorWithFlattening hands over for flash-attn."""
    sums = torch.tensor([0, BORDER, 11], dtype=torch.int32)
    return dict(cu_seq_lens_q=sums, cu_seq_lens_k=sums, max_length_q=7, max_length_k=7)


def one_by_one(model: Any, ids: Tensor) -> Tensor:
    return torch.cat([answers(model, input_ids=part)[0] for part in (ids[:, :BORDER], ids[:, BORDER:])], dim=1)


def kept_apart(pair: Pair, ids: Tensor, **said: Any) -> None:
    (packed,) = answers(pair.ours, input_ids=ids, **said)
    assert_same(one_by_one(pair.stock, ids), packed, rtol=2e-6)


@pytest.mark.parametrize("name", ["bert", "modernbert-local"])
def test_document_borders_separate_documents_in_encoders(name: str) -> None:
    kept_apart(pair(name), tokens(batch=1), position_ids=POSITIONS, **borders())


def test_stock_attention_leaks_where_ours_does_not() -> None:
    """The tests above can fail: stock attention reads the other document when borders alone tell it."""
    stock, _ = pair("llama")
    with pytest.raises(AssertionError, match="largest difference"):
        kept_apart(Pair(stock, stock), tokens(batch=1), position_ids=POSITIONS, **borders())


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


BORDERLESS = ("opt", "biogpt", "afmoe", "gpt_oss", "stablelm", "nemotron")
"""Families whose masks are made without positions, and two that pass no `cu_seq_lens_*` to attention."""


def family(name: str) -> Pair:
    return models(name, LISTED["decoders"][name], AutoModelForCausalLM)


def same_as_stock(pair: Pair, **inputs: Any) -> None:
    with torch.no_grad():
        assert_same(pair.stock(**copy.deepcopy(inputs)).logits, pair.ours(**inputs).logits)


@pytest.mark.parametrize("name", BORDERLESS)
@pytest.mark.parametrize("rows", [1, 2])
def test_positions_that_fall_back_separate_documents_in_one_row_and_in_many(name: str, rows: int) -> None:
    for positions in {1: [POSITIONS], 2: [POSITIONS, POSITIONS.expand(2, -1)]}[rows]:
        kept_apart(family(name), tokens(batch=rows), position_ids=positions, use_cache=False)


def test_rows_of_a_batch_have_borders_of_their_own() -> None:
    stock, ours = family("gpt_oss")
    ids = tokens(batch=2)
    positions = torch.cat([POSITIONS, torch.arange(11)[None]])
    (packed,) = answers(ours, input_ids=ids, position_ids=positions, use_cache=False)
    assert_same(*answers(stock, input_ids=ids[1:]), packed[1:])
    assert_same(one_by_one(stock, ids[:1]), packed[:1])


@pytest.mark.parametrize("name", BORDERLESS)
@pytest.mark.parametrize("said", ["mask", "floats", "mask and cache", "cache", "own cache", "cache, not to be used"])
def test_a_mask_or_a_cache_speaks_louder_than_positions(name: str, said: str) -> None:
    """Stock attention never reads documents then."""
    pair = family(name)
    ids, ones = tokens(batch=1), torch.ones(1, 11, dtype=torch.long)
    more: dict[str, dict[str, Any]] = {
        "mask": {"attention_mask": ones, "use_cache": False},
        "floats": {"attention_mask": ones.float(), "use_cache": False}, "mask and cache": {"attention_mask": ones},
        "cache": {}, "own cache": with_cache(pair.ours, DynamicCache()),
        "cache, not to be used": {**with_cache(pair.ours, DynamicCache()), "use_cache": False},
    }  # fmt: skip
    same_as_stock(pair, input_ids=ids, position_ids=POSITIONS, **more[said])


@pytest.mark.parametrize("name", BORDERLESS)
def test_lengths_speak_louder_than_a_mask_or_a_cache(name: str) -> None:
    for more in ({}, {"attention_mask": torch.ones(1, 11, dtype=torch.long)}, {"use_cache": False}):
        kept_apart(family(name), tokens(batch=1), position_ids=POSITIONS, **borders(), **more)


@needs_tracing
@pytest.mark.parametrize("name", ["opt", "gpt_oss"])
def test_lengths_separate_documents_in_a_graph(name: str) -> None:
    stock, ours = family(name)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    kept_apart(Pair(stock, compiled), tokens(batch=1), position_ids=POSITIONS, **borders())


def chunked_documents(masked: bool) -> tuple[Pair, Tensor, dict[str, Any], Tensor]:
    """A model with chunks of four, tokens, two documents, the second amid a chunk, and logits of each alone."""
    one = LISTED["decoders"]["llama4_text"] | {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}
    both = models("llama4_text", one, AutoModelForCausalLM)
    both.ours.requires_grad_(False)  # else nothing traces it
    ids, sums = tokens(batch=1), torch.tensor([0, 3, 11], dtype=torch.int32)
    told: dict[str, Any] = dict(cu_seq_lens_q=sums, cu_seq_lens_k=sums, max_length_q=8, max_length_k=8)
    told |= dict(position_ids=torch.cat([torch.arange(3), torch.arange(8)])[None], use_cache=False)
    told |= {"attention_mask": torch.ones_like(ids)} if masked else {}
    alone = [answers(both.stock, input_ids=part)[0] for part in (ids[:, :3], ids[:, 3:])]
    return both, ids, told, torch.cat(alone, 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("masked", [False, True])
def test_chunks_count_from_their_document_in_a_traced_graph(masked: bool) -> None:
    """Lengths are told to attention, behind the mask."""
    (_, ours), ids, told, expected = chunked_documents(masked)

    def run(ids: Tensor) -> Any:
        return ours(input_ids=ids, **told).logits

    with torch.no_grad():
        assert_same(expected, torch.jit.trace(run, (ids,), check_trace=False)(ids))


@needs_tracing
@pytest.mark.parametrize("name", ["adaattn", "adaattn_sdpa"])
def test_chunks_count_from_their_document_in_a_compiled_graph_or_are_refused(name: str) -> None:
    """There a mask that was passed fixes them before the lengths are heard of; before 5.23 every mask does."""
    for masked in (False, True):
        (_, ours), ids, told, expected = chunked_documents(masked)
        ours.set_attn_implementation(name)
        torch._dynamo.reset()
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        if masked or not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
            with pytest.raises(Exception, match="cu_seq_lens_q: got packed documents beside an attention_mask"):
                answers(compiled, input_ids=ids, **told)
        else:
            assert_same(expected, *answers(compiled, input_ids=ids, **told))
        ours.set_attn_implementation("adaattn")


@pytest.mark.parametrize("name", BORDERLESS)
@pytest.mark.parametrize("masked", [False, True])
def test_other_positions_than_those_of_documents_are_positions(name: str, masked: bool) -> None:
    """A gap, every second one, halves and constants; where Transformers takes them for borders, we do, too."""
    pair = family(name)
    more = {"attention_mask": torch.ones(1, 11, dtype=torch.long)} if masked else {"use_cache": False}
    count = torch.arange(11)
    for positions in (count + (count > 4) * 15, count * 2, count // 2, count * 0 + 3):
        same_as_stock(pair, input_ids=tokens(batch=1), position_ids=positions[None], **more)


@pytest.mark.parametrize("name", BORDERLESS)
def test_a_prompt_that_fills_a_cache_and_one_without_share_nothing(name: str) -> None:
    """The second call has the very shape of the first; what was remembered of one must not be told of the other."""
    both, ids = family(name), tokens(batch=1)
    for _ in range(2):
        same_as_stock(both, input_ids=ids, position_ids=POSITIONS)
        kept_apart(both, ids, position_ids=POSITIONS, use_cache=False)


@needs_tracing
@pytest.mark.parametrize(
    ("name", "how"), [*((name, "traced") for name in BORDERLESS), *(("opt", way) for way in ("compiled", "exported"))]
)
def test_graphs_do_as_stock_does(name: str, how: str) -> None:
    """A graph cannot read positions, and never cuts a mask of the caller's."""
    pair = family(name)
    ids, mask = tokens(batch=1, length=8), torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])

    class Logits(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.model, self.name = pair.ours, name

        def forward(self, ids: Tensor, other: Tensor) -> Any:
            return self.model(input_ids=ids, use_cache=False, **{self.name: other}).logits

    for said, given in (("attention_mask", mask), ("position_ids", positions)):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how == "compiled":
                torch._dynamo.reset()
                found = torch.compile(Logits(said), backend="eager", fullgraph=True)(ids, given)
            elif how == "traced":
                found = torch.jit.trace(Logits(said), (ids, given), check_trace=False)(ids, given)
            else:
                found = torch.export.export(Logits(said), (ids, given)).module()(ids, given)
            expected = pair.stock(input_ids=ids, use_cache=False, **{said: given}).logits
        assert_same(expected, found, mask if said == "attention_mask" else None)


@needs_tracing
@pytest.mark.parametrize(
    ("name", "compiled"), [("Gemma4", False), ("Gemma4Unified", False), ("Gemma4", True)],
    ids=lambda one: "graph" * one if isinstance(one, bool) else one,
)  # fmt: skip
def test_documents_where_shared_keys_leave_the_last_queries_alone(name: str, compiled: bool) -> None:
    """From the first layer that shares keys on, Gemma 4 computes the rows of `logits_to_keep` and no other."""
    stock, ours = sharing(name)
    ids, expected = tokens(batch=1), one_by_one(stock, tokens(batch=1))
    run = torch.compile(ours, backend="eager", fullgraph=True, dynamic=False) if compiled else ours
    given = dict(input_ids=ids, position_ids=POSITIONS, use_cache=False, **borders())
    for keep in (0, 1, 3, 9, torch.tensor([2, 10]))[3 * compiled :]:  # each number is a graph of its own
        (found,) = answers(run, **given, logits_to_keep=keep)
        assert_same(expected[:, -keep:] if isinstance(keep, int) else expected[:, keep], found)
    if not compiled:
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[0, :6] = 0
        flow = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
        assert torch.equal(stock.generate(tokens(batch=2), **flow), prepare(ours).generate(tokens(batch=2), **flow))


@pytest.mark.parametrize("shared", [True, False], ids=["all see the cache", "the first does"])
def test_documents_behind_a_filled_cache(shared: bool) -> None:
    stock, ours = pair("llama")
    ids, prompt, cache = tokens(batch=1), tokens(batch=1).flip(1), DynamicCache(config=ours.config)
    first, lengths = ids[:, :5], torch.tensor([0, BORDER, 11], dtype=torch.int32)
    keys = lengths.clone() if shared else lengths + torch.tensor([0, 5, 5], dtype=torch.int32)
    with torch.no_grad():
        ours(input_ids=first, past_key_values=cache)
        positions = POSITIONS + torch.tensor([5] * BORDER + [5 if shared else 0] * 7)
        told = dict(position_ids=positions, past_key_values=cache, cu_seq_lens_q=lengths, cu_seq_lens_k=keys)
        found = ours(input_ids=prompt, **told).logits
        for part, at in ((slice(0, BORDER), 5), (slice(BORDER, 11), 5 if shared else 0)):
            whole = torch.cat([first[:, :at], prompt[:, part]], 1)
            assert_same(stock(input_ids=whole).logits[:, at:], found[:, part])
