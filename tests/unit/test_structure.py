"""Structures: their runs say what `visible` defines, and settling changes no visibility."""

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.infer import infer_structure
from adaattn_hf.attention.reference import attention
from adaattn_hf.attention.runs import Runs, aligned_runs
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.plans.execute import rows_within

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


@pytest.mark.parametrize(("structure", "shape"), [
    (MaskStructure(1, 4, 4), "full"), (MaskStructure(1, 4, 4, causal=True), "causal"),
    (MaskStructure(1, 2, 4, causal=True, q_offset=2), "suffix"),
    (MaskStructure(1, 4, 4, causal=True, window=2), "window"),
    (MaskStructure(1, 4, 4, causal=True, window=4), "causal"),
    (MaskStructure(1, 4, 4, window=3, sinks=1), "window"),
    (MaskStructure(1, 4, 4, causal=True, q_offset=torch.tensor(0)), "ragged"),
    (MaskStructure(1, 4, 4, mask=torch.ones(1, 1, 4, 4, dtype=torch.bool)), "irregular"),
])  # fmt: skip
def test_shape(structure: MaskStructure, shape: str) -> None:
    assert structure.shape == shape
    padded = MaskStructure(2, 4, 4, causal=True, key_padding=torch.ones(2, 4, dtype=torch.bool))
    assert (padded.shape, padded.simplified().shape) == ("ragged", "causal"), "padding of ones is none"


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


Q, K = (0, 90, 91, 400, 420), (0, 90, 400, 800, 1000)
RULES = [(None, 0), (70, 0), (70, 3)]


def structure(window: int | None, sinks: int) -> MaskStructure:
    return Runs.of(aligned_runs(Q, K, 425, 1010, True), 1, 425, 1010, True, window).with_changes(sinks=sinks)


def alone(window: int | None, sinks: int, n: int) -> MaskStructure:
    q_len, k_len = Q[n + 1] - Q[n], K[n + 1] - K[n]
    return MaskStructure(1, q_len, k_len, True, k_len - q_len, window, sinks)


@pytest.mark.parametrize(("window", "sinks"), RULES)
def test_a_run_sees_what_it_would_see_alone(window: int | None, sinks: int) -> None:
    made = structure(window, sinks)
    seen = made.visible()
    for n in range(4):
        own = alone(window, sinks, n)
        block = seen[:, :, Q[n] : Q[n + 1]]
        assert torch.equal(block[..., K[n] : K[n + 1]], own.visible().expand(1, 1, -1, -1))
        assert block.sum() == block[..., K[n] : K[n + 1]].sum(), "nothing of another run"
        assert torch.equal(made.positions("cpu")[:, Q[n] : Q[n + 1]], own.positions("cpu"))
    assert not seen[:, :, 420:].any()
    assert torch.equal(made.visible(80, 100), seen[:, :, 80:100])
    rows = torch.tensor([5, 90, 410])
    assert torch.equal(made.visible(rows=rows), seen[:, :, rows])


@pytest.mark.parametrize(("window", "sinks"), RULES)
@pytest.mark.parametrize("backend", ["native", "sdpa", "eager"])
def test_backends_compute_each_run_alone(backend: str, window: int | None, sinks: int) -> None:
    query, key, value = torch.randn(1, 4, 425, 16), torch.randn(1, 2, 1010, 16), torch.randn(1, 2, 1010, 16)
    out = select.attend(AttentionCall(query, key, value, structure(window, sinks), 0.25), backend).out
    for n in range(4):
        q, k = slice(Q[n], Q[n + 1]), slice(K[n], K[n + 1])
        own = AttentionCall(query[:, :, q], key[:, :, k], value[:, :, k], alone(window, sinks, n), 0.25)
        torch.testing.assert_close(out[:, q], attention(own).out.float(), atol=1e-5, rtol=1e-5)
    assert not out[:, 420:].any()


def test_places_say_without_data_which_rows_a_plan_speaks_for() -> None:
    made = structure(None, 0)
    assert made.query_positions == (0, 400)
    assert rows_within(made, 400, torch.device("cpu")) is True
    assert torch.equal(rows_within(made, 300, torch.device("cpu")), made.positions("cpu") < 300)
    runs = [run._replace(q_start=0) for run in aligned_runs((0, 1), (0, 50), 1, 60, True)]
    steps = Runs.of(runs, 1, 1, 60, True, None)
    assert steps.query_positions == (49, 50)
    assert rows_within(steps, 49, torch.device("cpu")) is False
    assert MaskStructure(1, 3, 9, True, 6).query_positions == (6, 9)
    assert MaskStructure(1, 3, 9, True, torch.tensor(6)).query_positions is None


@pytest.mark.parametrize(("cu_q", "cu_k", "words"), [
    ((0, 4), (0, 4, 8), "^cu_seqlens_k: got 3 entries"),
    ((0, 4, 3), (0, 4, 8), "^cu_seqlens_q: got .* running sums"),
    ((0, 4), (0, 99), "^cu_seqlens_k: got .* at most 9 tokens"),
])  # fmt: skip
def test_sums_that_cannot_be_are_refused(cu_q: tuple[int, ...], cu_k: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        aligned_runs(cu_q, cu_k, 9, 9, True)
