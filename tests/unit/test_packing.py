"""Borders of packed documents, told by running sums of lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.patches.packing import Packed, with_documents
from adaattn_hf.structure import CallStructure


def sums(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def documents_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 4)),
    dense=st.booleans(),
    known=st.booleans(),
)
def test_no_query_sees_another_document(
    lengths: list[int], causal: bool, window: int | None, dense: bool, known: bool
) -> None:
    """Whatever else is said of the call: a window, a dense mask, documents that restarting positions told."""
    total = sum(lengths)
    ids = documents_of(lengths)
    mask = torch.rand(1, 1, total, total) > 0.3 if dense else None
    structure = CallStructure(
        1, total, total, causal=causal, window=window, mask=mask, k_segments=ids[None] if known else None
    )
    packed = with_documents(structure, sums(*lengths), None)
    same = ids[:, None] == ids[None, :]
    assert torch.equal(packed.visible(), structure.visible() & same)


@given(
    pairs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_documents_of_queries_and_of_keys_may_differ_in_length(pairs: list[tuple[int, int]]) -> None:
    q_lengths, k_lengths = [q for q, _ in pairs], [k for _, k in pairs]
    structure = CallStructure(1, sum(q_lengths), sum(k_lengths))
    packed = with_documents(structure, sums(*q_lengths), sums(*k_lengths))
    same = documents_of(q_lengths)[:, None] == documents_of(k_lengths)[None, :]
    assert torch.equal(packed.visible()[0, 0], same)


def test_all_layers_of_a_forward_share_one_packed_structure() -> None:
    structure, borders = CallStructure(1, 5, 5, causal=True), sums(2, 3)
    known: Packed = {}
    first = with_documents(structure, borders, borders, known)
    assert with_documents(structure, borders, borders, known) is first
    other = with_documents(structure, sums(3, 2), None, known)
    assert other is not first
    assert not torch.equal(other.visible(), first.visible())


def test_several_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: .* got a batch of 2; flatten the batch"):
        with_documents(CallStructure(2, 5, 5), sums(2, 3), None)


def test_causal_documents_of_unlike_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: .* as many keys as queries, got 3 and 5"):
        with_documents(CallStructure(1, 3, 5, causal=True), sums(1, 2), sums(2, 3))
