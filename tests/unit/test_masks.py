"""The mask function says what stock's dense masks say; every nested function of Transformers is read, or is unknown."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPTBigCodeConfig
from transformers import masking_utils as mu
from transformers.masking_utils import and_masks, bidirectional_mask_function, causal_mask_function, sdpa_mask

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.mask import masks, structured_mask
from adaattn_hf.patches.mask.mask_pattern import read_pattern
from adaattn_hf.patches.mask.masks import adaattn_mask
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from ..support.operators import NamedOperators

MaskFunction = Callable[..., Any]


def every_third(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key) % 3 == 0


@st.composite
def rules(draw: st.DrawFn, batch: int, length: int) -> tuple[str, MaskFunction]:
    """A mask function as Transformers composes it, for `length` keys that start at index 0."""
    number = st.integers(1, length + 2)
    kinds: dict[str, Callable[[], MaskFunction]] = {
        "causal": lambda: causal_mask_function, "bidirectional": lambda: bidirectional_mask_function,
        "window": lambda: mu.sliding_window_causal_mask_function(draw(number)),
        "bidirectional window": lambda: and_masks(
            mu.sliding_window_bidirectional_overlay(draw(number)), bidirectional_mask_function
        ),
        "chunked": lambda: mu.chunked_causal_mask_function(
            draw(number), torch.tensor(draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)))
        ),
        "spans": lambda: mu.or_masks(causal_mask_function, mu.blockwise_overlay(draw(numbers(batch, length)))),
        "window and spans": lambda: mu.or_masks(
            mu.sliding_window_causal_mask_function(draw(number)), mu.blockwise_overlay(draw(numbers(batch, length)))
        ),
        "unknown": lambda: and_masks(causal_mask_function, every_third),
    }  # fmt: skip
    kind = draw(st.sampled_from(sorted(kinds)))
    return kind, kinds[kind]()


@st.composite
def numbers(draw: st.DrawFn, batch: int, length: int) -> Tensor:
    """`[batch, length]`: -1 for text, the number of an image elsewhere."""
    rows = st.lists(st.integers(-1, 2), min_size=length, max_size=length)
    return torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    kv_offset = draw(st.sampled_from([0, 0, 2]))
    kv_len = draw(st.integers(1, length))
    q_len = draw(st.integers(1, kv_len))
    offset: Any = kv_offset + kv_len - q_len
    if draw(st.booleans()):
        offset = torch.tensor(offset)
    total = kv_len + kv_offset
    _, function = draw(rules(batch, total))
    padding = None
    if draw(st.booleans()):
        row = st.lists(st.booleans(), min_size=total, max_size=total)
        padding = torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))
    return dict(
        batch_size=batch, q_length=q_len, kv_length=kv_len, q_offset=offset, kv_offset=kv_offset,
        mask_function=function, attention_mask=padding, device="cpu",
    )  # fmt: skip


@settings(max_examples=100)
@given(call=calls())
def test_structure_equals_the_dense_stock_mask(call: dict[str, Any]) -> None:
    expected = sdpa_mask(**call, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    assert expected is not None
    found = adaattn_mask(**call)
    assert isinstance(found, StructuredMask)
    assert torch.equal(found.dense(), expected.expand(found.shape))


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), window=st.one_of(st.none(), st.integers(1, 5)),
    past=st.integers(0, 3),
)  # fmt: skip
def test_packed_documents_equal_the_dense_stock_mask(lengths: list[int], window: int | None, past: int) -> None:
    """Behind keys of a past the documents of queries are not those of keys: no structure says so."""
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    inner = causal_mask_function if window is None else mu.sliding_window_causal_mask_function(window)
    function = and_masks(inner, mu.packed_sequence_mask_function(documents))
    keys, past = sum(lengths), min(past, sum(lengths) - 1)
    call: dict[str, Any] = dict(batch_size=1, q_length=keys - past, kv_length=keys, q_offset=past, device="cpu")
    call["mask_function"] = function
    found = adaattn_mask(**call)
    assert isinstance(found, StructuredMask)
    assert (found.structure.mask is None) == (past == 0)
    expected = sdpa_mask(**call, allow_is_causal_skip=False)
    assert expected is not None
    assert torch.equal(found.dense(), expected)


@pytest.mark.parametrize("function", [
    causal_mask_function, bidirectional_mask_function, mu.sliding_window_causal_mask_function(3),
    mu.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    and_masks(mu.sliding_window_bidirectional_overlay(2), bidirectional_mask_function),
], ids=["causal", "bidirectional", "window", "chunked", "bidirectional window"])  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
def test_known_rules_never_become_a_dense_mask(function: MaskFunction, padded: bool) -> None:
    padding = torch.tensor([[True] * 6, [False, False, *[True] * 4]]) if padded else None
    found = adaattn_mask(batch_size=2, q_length=6, kv_length=6, mask_function=function, attention_mask=padding)
    assert isinstance(found, StructuredMask)
    assert found.structure.mask is None
    tensors = [value for value in vars(found.structure).values() if isinstance(value, Tensor)]
    assert all(tensor.numel() <= 2 * 6 for tensor in tensors)


def test_a_prepared_mask_comes_back_as_it_is() -> None:
    prepared = adaattn_mask(batch_size=1, q_length=4, kv_length=4)
    assert adaattn_mask(batch_size=1, q_length=4, kv_length=4, attention_mask=prepared) is prepared


def test_the_offset_of_a_preallocated_cache_is_copied() -> None:
    """The cache increments the very tensor that it hands over, before the layer looks at its mask."""
    offset = torch.tensor(3)
    found = adaattn_mask(batch_size=1, q_length=1, kv_length=8, q_offset=offset)
    assert isinstance(found, StructuredMask)
    offset += 1
    assert found.dense()[0, 0, 0].tolist() == [True] * 4 + [False] * 4


def test_a_short_padding_mask_hides_the_keys_that_it_does_not_cover() -> None:
    found = adaattn_mask(1, 1, 5, q_offset=4, attention_mask=torch.ones(1, 3, dtype=torch.bool))
    assert isinstance(found, StructuredMask)
    assert found.dense()[0, 0, 0].tolist() == [True, True, True, False, False]


def test_a_traced_mask_keeps_the_padding_beside_it_where_a_model_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "tracing", lambda: True)
    padding = torch.tensor([[0, 1, 1, 1, 1]])
    configs = GPT2Config(adaattn={}), GPT2Config()
    kept, dropped = (structure_of(adaattn_mask(1, 5, 5, attention_mask=padding, config=one)) for one in configs)
    torch.testing.assert_close(kept.mask, dropped.mask)
    torch.testing.assert_close(kept.key_padding, padding.bool())
    assert dropped.key_padding is None


def test_a_family_that_computes_with_masks_gets_a_tensor() -> None:
    found = adaattn_mask(batch_size=1, q_length=3, kv_length=3, config=GPTBigCodeConfig())
    assert type(found) is Tensor
    assert found.dtype == torch.bool


def structure_of(mask: StructuredMask | Tensor) -> MaskStructure:
    assert isinstance(mask, StructuredMask)
    return mask.structure


def test_passes_of_like_shape_share_their_structure_and_no_other_pass_does() -> None:
    first = structure_of(adaattn_mask(2, 5, 5))
    assert structure_of(adaattn_mask(2, 5, 5)) is first
    assert structure_of(adaattn_mask(2, 5, 5, attention_mask=torch.ones(2, 5, dtype=torch.bool))) is first
    others = [
        adaattn_mask(1, 5, 5), adaattn_mask(2, 5, 5, mask_function=bidirectional_mask_function), adaattn_mask(2, 5, 6),
        adaattn_mask(2, 5, 6, q_offset=1),
        adaattn_mask(2, 5, 5, attention_mask=torch.tensor([[True] * 5, [False] + [True] * 4])),
    ]  # fmt: skip
    assert len({id(structure) for structure in [first, *map(structure_of, others)]}) == 6
    with NamedOperators():
        assert structure_of(adaattn_mask(2, 5, 5)) is not first


def test_shared_structures_do_not_pile_up() -> None:
    for length in range(1, 200):
        adaattn_mask(1, 1, length, q_offset=length - 1)
    assert len(structured_mask._structures) <= structured_mask.MAX_STRUCTURES


PADDING = torch.ones(1, 6, dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2]])
SPANS = torch.tensor([[-1, 0, 0, -1, 1, 1]])
LEFT = torch.tensor([2])
TWICE = mu.and_masks(mu.causal_mask_function, mu.sliding_window_causal_mask_function(4))  # one rule


@pytest.mark.parametrize(("function", "expected"), [
    (mu.causal_mask_function, {"causal": True}), (mu.bidirectional_mask_function, {"causal": False}),
    (mu.sliding_window_overlay(4), {"window": 4}), (mu.sliding_window_bidirectional_overlay(4), {"window": 5}),
    (mu.sliding_window_causal_mask_function(4), {"causal": True, "window": 4}),
    (mu.chunked_causal_mask_function(3, LEFT), {"causal": True, "chunk": 3, "chunk_start": LEFT}),
    (mu.padding_mask_function(PADDING), {"key_padding": PADDING}),
    (mu.packed_sequence_mask_function(DOCUMENTS), {"k_segments": DOCUMENTS}),
    (mu.blockwise_overlay(SPANS), {"spans": SPANS}),
    (mu.and_masks(mu.sliding_window_causal_mask_function(4), mu.packed_sequence_mask_function(DOCUMENTS),
                  mu.padding_mask_function(PADDING)),
     {"causal": True, "window": 4, "k_segments": DOCUMENTS, "key_padding": PADDING}),
    (TWICE, {"causal": True, "window": 4}),
    (mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(SPANS)), {"causal": True, "spans": SPANS}),
    (mu.or_masks(mu.blockwise_overlay(SPANS), mu.causal_mask_function), {"causal": True, "spans": SPANS}),
])  # fmt: skip
def test_composition_is_read(function: Any, expected: dict[str, Any]) -> None:
    found = read_pattern(function)
    assert found is not None
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] is value if isinstance(value, torch.Tensor) else found[name] == value


def foreign(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query == key


@pytest.mark.parametrize("function", [
    foreign, lambda b, h, q, k: q >= k, mu.and_masks(mu.causal_mask_function, foreign),
    mu.or_masks(mu.causal_mask_function, foreign),
    mu.or_masks(mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(SPANS)), foreign),
    mu.or_masks(mu.causal_mask_function, mu.sliding_window_overlay(3)),
    mu.or_masks(mu.causal_mask_function, mu.bidirectional_mask_function, mu.blockwise_overlay(SPANS)),
    mu.or_masks(mu.sliding_window_causal_mask_function(3), mu.blockwise_overlay(SPANS)),
    mu.and_masks(mu.sliding_window_overlay(3), mu.sliding_window_overlay(4)),
    mu.and_masks(mu.causal_mask_function, mu.bidirectional_mask_function),
    mu.and_masks(mu.packed_sequence_mask_function(DOCUMENTS), mu.packed_sequence_mask_function(SPANS)),
    mu.and_masks(
        mu.or_masks(mu.causal_mask_function, mu.blockwise_overlay(SPANS)),
        mu.packed_sequence_mask_function(DOCUMENTS),
    ),
])  # fmt: skip
def test_what_has_no_structure_is_unknown(function: Any) -> None:
    assert read_pattern(function) is None


@pytest.mark.skipif(not hasattr(mu, "remap_positions_for_packed_sequence"), reason="this version remaps no positions")
def test_positions_counted_per_document_change_no_rule() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    remapped = mu.remap_positions_for_packed_sequence(mu.sliding_window_causal_mask_function(2), positions)
    found = read_pattern(mu.and_masks(remapped, mu.packed_sequence_mask_function(DOCUMENTS)))
    assert found is not None
    assert found.keys() == {"causal", "window", "k_segments"}
    # chunks are counted by positions: those of a document from its first key, if it begins a chunk
    for first, known in ((0, True), (3, False)):
        chunks = mu.remap_positions_for_packed_sequence(
            mu.chunked_causal_mask_function(2, torch.tensor([0])), positions + first
        )
        assert (read_pattern(chunks) is not None) is known


def test_every_factory_of_transformers_is_known_or_known_to_be_unknown() -> None:
    """A factory that a new release adds must be looked at."""
    functions = {
        name for name, value in vars(mu).items() if callable(value) and getattr(value, "__module__", "") == mu.__name__
        and (name.endswith(("_overlay", "_mask_function", "_masks")) or name.startswith("remap_"))
    }  # fmt: skip
    looked_at = {
        "add_offsets_to_mask_function", "and_masks", "bidirectional_mask_function", "blockwise_overlay",
        "causal_mask_function", "chunked_causal_mask_function", "chunked_overlay",
        "create_chunked_causal_mask_function", "or_masks", "packed_sequence_mask_function", "padding_mask_function",
        "remap_positions_for_packed_sequence", "sliding_window_bidirectional_mask_function",
        "sliding_window_bidirectional_overlay", "sliding_window_causal_mask_function", "sliding_window_overlay",
    }  # fmt: skip
    assert functions - looked_at == set()
