"""Structures: their runs say what `visible` defines, and settling changes no visibility."""

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.infer import infer_structure
from adaattn_hf.attention.structure import MaskStructure

from ..support.calls import structures


@st.composite
def drawn(draw: st.DrawFn) -> MaskStructure:
    kv_len = draw(st.integers(1, 24))
    return draw(structures(draw(st.integers(1, 3)), draw(st.sampled_from([1, kv_len, max(1, kv_len - 3)])), kv_len))


def of_segments(structure: MaskStructure) -> torch.Tensor:
    seen = torch.zeros(structure.batch, structure.q_len, structure.kv_len, dtype=torch.bool)
    for row, q_start, q_len, k_start, k_len, offset in structure.segments() or ():
        local = MaskStructure(
            1, q_len, k_len, causal=structure.causal, q_offset=offset, window=structure.window, sinks=structure.sinks
        )
        seen[row, q_start : q_start + q_len, k_start : k_start + k_len] |= local.visible()[0, 0]
    return seen


@settings(max_examples=400)
@given(structure=drawn())
def test_segments_say_what_visible_defines(structure: MaskStructure) -> None:
    if structure.segments() is None:
        return
    expected = structure.visible().expand(structure.batch, 1, -1, -1)[:, 0]
    assert torch.equal(of_segments(structure), expected)


@settings(max_examples=400)
@given(structure=drawn(), order=st.permutations(range(24)), count=st.integers(1, 24))
def test_any_rows_see_what_visible_defines(structure: MaskStructure, order: list[int], count: int) -> None:
    """Also beside a dense mask of heads, and rows in any order."""
    rows = torch.tensor([row for row in order if row < structure.q_len][:count])
    dense = torch.rand(1, 2, structure.q_len, structure.kv_len) < 0.7
    for one in (structure, structure.with_changes(mask=dense)):
        assert torch.equal(one.visible(rows=rows), one.visible()[:, :, rows])


def test_chunks_of_a_document_count_from_its_first_key_even_if_that_is_padding() -> None:
    documents = torch.tensor([[0] * 6 + [1] * 4])
    structure = MaskStructure(
        1, 10, 10, causal=True, chunk=4, key_padding=torch.arange(10)[None] >= 3, q_segments=documents,
        k_segments=documents,
    )  # fmt: skip
    assert torch.equal(of_segments(structure), structure.visible()[:, 0])
    assert structure.segments() == ((0, 3, 1, 3, 1, 0), (0, 4, 2, 4, 2, 0), (0, 6, 4, 6, 4, 0))


@settings(max_examples=200)
@given(structure=drawn())
def test_segments_are_inside_and_in_order(structure: MaskStructure) -> None:
    last = (-1, 0)
    for row, q_start, q_len, k_start, k_len, _ in structure.segments() or ():
        assert 0 <= row < structure.batch
        assert 0 <= q_start < q_start + q_len <= structure.q_len
        assert 0 <= k_start < k_start + k_len <= structure.kv_len
        assert (row, q_start) >= last
        last = (row, q_start + q_len)


@settings(max_examples=200)
@given(structure=drawn())
def test_settling_changes_no_visibility(structure: MaskStructure) -> None:
    settled = structure.simplified()
    assert isinstance(settled.q_offset, int)
    assert settled.simplified() is settled
    for start, stop in ((0, structure.q_len), (structure.q_len // 2, structure.q_len)):
        mine, theirs = settled.visible(start, stop), structure.visible(start, stop)
        batch = (structure.batch, max(mine.shape[1], theirs.shape[1]), -1, -1)
        assert torch.equal(mine.expand(batch), theirs.expand(batch))


class Elsewhere(torch.Tensor):
    """A tensor that does not lie in the host's memory, and notes whenever it is copied there."""

    is_cpu = False
    copied: ClassVar[list[int]] = []

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.copied.append(id(self))
        return self.as_subclass(torch.Tensor)


def test_each_tensor_is_copied_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All together, before the first is read: a device is waited for once, whatever settles or finds runs."""
    monkeypatch.setattr(Elsewhere, "copied", [])
    rules = {
        "q_offset": torch.tensor(0), "chunk_start": torch.tensor([1]), "key_padding": torch.arange(10)[None] >= 3,
        "k_segments": torch.tensor([[0] * 6 + [1] * 4]),
    }  # fmt: skip
    there = {name: tensor.as_subclass(Elsewhere) for name, tensor in rules.items()}
    here, structure = (
        MaskStructure(1, 10, 10, causal=True, chunk=4, q_segments=one["k_segments"], **one) for one in (rules, there)
    )
    settled = structure.simplified()
    assert Elsewhere.copied == [id(tensor) for tensor in there.values()]
    assert settled.segments() == structure.segments() == here.segments()
    assert len(Elsewhere.copied) == len(there)


@pytest.mark.parametrize(("structure", "kind"), [
    (MaskStructure(1, 4, 4), "full"), (MaskStructure(1, 4, 4, causal=True), "causal"),
    (MaskStructure(1, 2, 4, causal=True, q_offset=2), "suffix"),
    (MaskStructure(1, 4, 4, causal=True, window=2), "window"),
    (MaskStructure(1, 4, 4, causal=True, window=4), "causal"),
    (MaskStructure(1, 4, 4, window=3, sinks=1), "window"),
    (MaskStructure(1, 4, 4, causal=True, q_offset=torch.tensor(0)), "ragged"),
    (MaskStructure(1, 4, 4, mask=torch.ones(1, 1, 4, 4, dtype=torch.bool)), "irregular"),
])  # fmt: skip
def test_kind(structure: MaskStructure, kind: str) -> None:
    assert structure.kind == kind
    padded = MaskStructure(2, 4, 4, causal=True, key_padding=torch.ones(2, 4, dtype=torch.bool))
    assert (padded.kind, padded.simplified().kind) == ("ragged", "causal"), "padding of ones is none"


def read_back(mask: torch.Tensor) -> MaskStructure | None:
    batch, _, q_len, kv_len = mask.shape
    query, key = torch.zeros(batch, 2, q_len, 4), torch.zeros(batch, 2, kv_len, 4)
    found = infer_structure(AttentionCall(query, key, key, MaskStructure(batch, q_len, kv_len, mask=mask), 1.0))
    return None if found is None else found.structure


@settings(max_examples=200)
@given(structure=drawn(), heads=st.sampled_from([1, 2]))
def test_rules_read_from_a_dense_mask_are_that_mask_or_none(structure: MaskStructure, heads: int) -> None:
    dense = structure.visible().expand(structure.batch, heads, -1, -1)
    found = read_back(dense)
    if found is not None:
        assert found.mask is None
        assert torch.equal(found.visible().expand_as(dense), dense)


def test_one_mask_for_all_heads_is_read_and_one_for_each_is_not() -> None:
    causal = MaskStructure(2, 6, 6, causal=True).visible().expand(2, 2, 6, 6)
    found = read_back(causal)
    assert found is not None
    assert found.causal
    apart = causal.clone()
    apart[:, 1, 5, 0] = False
    assert read_back(apart) is None
    assert read_back(torch.zeros(1, 1, 6, 6, dtype=torch.bool)) is None, "no rule says that nothing is seen"
