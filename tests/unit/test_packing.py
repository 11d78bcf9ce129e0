"""Borders of packed documents, told by running sums of lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.call.interface import attention_function
from adaattn_hf.patches.mask.documents import with_documents, with_restarts
from adaattn_hf.patches.mask.structured_mask import StructuredMask


def sums(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def bordered(structure: MaskStructure, borders: Tensor) -> MaskStructure:
    return with_documents(structure, borders, borders)


def documents_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 4)), dense=st.booleans(), known=st.booleans(),
)  # fmt: skip
def test_no_query_sees_another_document(
    lengths: list[int], causal: bool, window: int | None, dense: bool, known: bool
) -> None:
    """Whatever else is said of the call: a window, a dense mask, documents that restarting positions told."""
    total = sum(lengths)
    ids = documents_of(lengths)
    mask = torch.rand(1, 1, total, total) > 0.3 if dense else None
    structure = MaskStructure(
        1, total, total, causal=causal, window=window, mask=mask, k_segments=ids[None] if known else None
    )
    packed = bordered(structure, sums(*lengths))
    same = ids[:, None] == ids[None, :]
    assert torch.equal(packed.visible(), structure.visible() & same)
    assert (packed.mask is not None) == dense


@given(
    first=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    second=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    causal=st.booleans(),
)
def test_borders_told_twice_are_all_borders(first: list[int], second: list[int], causal: bool) -> None:
    total = max(sum(first), sum(second))
    first, second = [*first, total - sum(first)], [*second, total - sum(second)]
    ids, others = documents_of(first), documents_of(second)
    structure = MaskStructure(1, total, total, causal=causal, q_segments=ids[None], k_segments=ids[None])
    packed = bordered(structure, sums(*second))
    assert packed.mask is None
    assert torch.equal(packed.visible(), structure.visible() & (others[:, None] == others[None, :]))


def test_spans_end_with_their_document() -> None:
    spans = torch.tensor([[-1, 0, 0, 0, -1, 1]])
    packed = bordered(MaskStructure(1, 6, 6, causal=True, spans=spans), sums(3, 3))
    ids, runs = documents_of([3, 3]), torch.tensor([-1, 0, 0, 0, -1, 1])
    together = (runs[:, None] == runs[None, :]) & (runs >= 0)[:, None]
    expected = (torch.ones(6, 6).tril().bool() | together) & (ids[:, None] == ids[None, :])
    assert packed.mask is None
    assert torch.equal(packed.visible()[0, 0], expected)


@given(
    rows=st.lists(
        st.lists(st.integers(2, 4), min_size=1, max_size=4).map(lambda found: [*found, 16 - sum(found)]),
        min_size=1,
        max_size=3,
    ),
    shared=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 4)),
)
def test_positions_that_fall_back_are_borders(rows: list[list[int]], shared: bool, window: int | None) -> None:
    """In every row of a batch; rows may share their positions."""
    batch = len(rows)
    rows = rows[:1] if shared else rows
    structure = MaskStructure(batch, 16, 16, causal=True, window=window)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    ids = torch.stack([documents_of(lengths) for lengths in rows])[:, None]
    same = ids[..., None] == ids[..., None, :]
    assert torch.equal(with_restarts(structure, positions).visible(), structure.visible() & same)


@pytest.mark.parametrize("positions", [
    [0, 1, 2, 20, 21, 22], [0, 2, 4, 6, 8, 10], [0, 0, 1, 1, 2, 2], [7, 7, 7, 7, 7, 7],
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5],
])  # fmt: skip
def test_positions_that_never_fall_back_are_no_borders(positions: list[float]) -> None:
    structure = MaskStructure(1, 6, 6, causal=True)
    assert with_restarts(structure, torch.tensor([positions])) is structure


def test_positions_say_nothing_of_rows_with_padding_or_a_past_or_without_data() -> None:
    positions = torch.tensor([[1, 1, 0, 1, 2]])
    padded = MaskStructure(1, 5, 5, causal=True, key_padding=torch.tensor([[0, 0, 1, 1, 1]]).bool())
    dense = MaskStructure(1, 5, 5, mask=torch.ones(1, 1, 5, 5).tril().bool())
    for structure in (padded, dense, MaskStructure(1, 5, 9, causal=True, q_offset=4)):
        assert with_restarts(structure, positions) is structure
    assert with_restarts(MaskStructure(1, 5, 5, causal=True), positions.to("meta")).plain


@given(pairs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4))
def test_documents_of_queries_and_of_keys_may_differ_in_length(pairs: list[tuple[int, int]]) -> None:
    q_lengths, k_lengths = [q for q, _ in pairs], [k for _, k in pairs]
    structure = MaskStructure(1, sum(q_lengths), sum(k_lengths))
    packed = with_documents(structure, sums(*q_lengths), sums(*k_lengths))
    same = documents_of(q_lengths)[:, None] == documents_of(k_lengths)[None, :]
    assert torch.equal(packed.visible()[0, 0], same)


def test_all_layers_of_a_forward_share_one_packed_structure() -> None:
    mask, query = StructuredMask(MaskStructure(1, 5, 5, causal=True), torch.device("cpu")), torch.randn(1, 2, 5, 8)
    for borders in (*[sums(2, 3)] * 2, sums(3, 2)):
        attention_function()(nn.Module(), query, query, query, mask, cu_seq_lens_q=borders, cu_seq_lens_k=borders)
    (*_, first), (*_, other) = mask.packed.values()
    assert not torch.equal(first.visible(), other.visible())


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("keys", [sums(2, 3), sums(1, 3), sums(3)], ids=str)
def test_causal_documents_whose_lengths_do_not_fit_are_refused(past: int, keys: Tensor) -> None:
    structure = MaskStructure(1, 3, 5, causal=True, q_offset=past)
    with pytest.raises(ValueError, match=r"cu_seq_lens_k: got \[.*\] for cu_seq_lens_q \[0, 1, 3\], expected the same"):
        with_documents(structure, sums(1, 2), keys)


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), past=st.integers(0, 5), cut=st.integers(0, 3),
    way=st.sampled_from(["one object", "two objects", "the first continues the cache"]),
    window=st.sampled_from([None, 3]),
)  # fmt: skip
def test_documents_behind_a_cache_see_it_and_themselves(
    lengths: list[int], past: int, cut: int, way: str, window: int | None
) -> None:
    """With queries for the last tokens alone, too, as layers that share keys have them."""
    tokens, borders = sum(lengths) + 1, sums(*lengths)
    first = way.startswith("the")
    keys = borders if way == "one object" else borders.clone()
    keys[1:] += past if first else 0
    cut, shared = min(cut, tokens - 1), past > 0 and not first
    structure = MaskStructure(1, tokens, past + tokens, causal=True, q_offset=past, window=window)
    mask = StructuredMask(structure, torch.device("cpu"))[:, :, cut - tokens :, :]
    if shared and mask.structure.windowed:
        with pytest.raises(ValueError, match="all continue what a cache holds, expected a layer without a window"):
            with_documents(mask.structure, borders, keys, mask.cut)
        return
    ids = documents_of([*lengths, 1])
    of_keys = torch.cat([torch.full((past,), -1 if shared else 0), ids])
    same = (ids[cut:, None] == of_keys) | (of_keys == -1)
    packed = with_documents(mask.structure, borders, keys, mask.cut)
    assert torch.equal(packed.visible()[0, 0], structure.visible()[0, 0, cut:] & same)


@pytest.mark.parametrize("wrong", [[], [0], [0.0, 6.0], [0, 4, 3, 6], [6, 3, 0], [1, 6], [0, 3, 7]])
@pytest.mark.parametrize("name", ["q", "k"])
def test_lengths_that_fall_or_pass_the_tokens_are_refused(wrong: list[int], name: str) -> None:
    right, bad = sums(2, 4), torch.tensor(wrong) if wrong[:1] == [0.0] else torch.tensor(wrong, dtype=torch.int32)
    given = (bad, right) if name == "q" else (right, bad)
    with pytest.raises(ValueError, match=rf"cu_seq_lens_{name}: got .*from 0 to at most 6"):
        with_documents(MaskStructure(1, 6, 6, causal=name == "k"), *given)


def test_tokens_behind_the_last_sum_are_a_document() -> None:
    found = bordered(MaskStructure(1, 6, 6, causal=True), sums(2, 3))
    expected = bordered(MaskStructure(1, 6, 6, causal=True), sums(2, 3, 1))
    assert torch.equal(found.visible(), expected.visible())
