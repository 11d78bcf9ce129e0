"""Statistics of sampled rows against brute force on the full matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.stats.entropy import dyadic_edges, mass_sparsity, row_entropy, scale_entropy
from adaattn_hf.stats.profile import extrapolated_mass, mass_profile
from adaattn_hf.stats.rows import causal_visible, stratified_rows


def _inputs(
    seed: int, heads: int = 4, kv_heads: int = 2, n: int = 37, d: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, n, d, generator=generator, dtype=torch.float64) * 3
    return query, torch.randn(2, kv_heads, n, d, generator=generator, dtype=torch.float64)


def _weights(
    query: torch.Tensor, key: torch.Tensor, scaling: float, visible: torch.Tensor | None
) -> torch.Tensor:
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT * scaling
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, -1)


@given(
    seed=st.integers(0, 999), block=st.sampled_from([1, 5, 16, 64]), scaling=st.sampled_from([0.1, 1.0, 20.0])
)
@settings(deadline=None, max_examples=25)
def test_streamed_entropy_equals_materialised(seed: int, block: int, scaling: float) -> None:
    query, key = _inputs(seed)
    visible = causal_visible(torch.arange(37), 37)
    weights = _weights(query, key, scaling, visible)
    found = row_entropy(query, key, scaling=scaling, visible=visible, block=block)
    torch.testing.assert_close(found.entropy, -torch.xlogy(weights, weights).sum(-1), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found.collision, -weights.square().sum(-1).log(), atol=1e-9, rtol=1e-9)
    assert (found.visible == torch.arange(1, 38)).all()


def test_entropy_of_uniform_one_hot_and_empty_rows() -> None:
    query, key = torch.zeros(1, 1, 1, 4), torch.randn(1, 1, 10, 4)
    uniform = row_entropy(query, key, scaling=1.0, block=3)
    assert uniform.entropy.item() == pytest.approx(math.log(10), rel=1e-6)
    assert uniform.effective_support.item() == pytest.approx(10, rel=1e-5)
    assert uniform.normalised.item() == pytest.approx(1.0, rel=1e-6)
    sharp = torch.zeros(1, 1, 10, 4)
    sharp[0, 0, 3, 0] = 1.0
    assert (
        row_entropy(torch.tensor([[[[500.0, 0, 0, 0]]]]), sharp, scaling=1.0, block=4).entropy.item() < 1e-6
    )
    empty = row_entropy(query, key, scaling=1.0, visible=torch.zeros(1, 1, 1, 10, dtype=torch.bool), block=4)
    assert empty.entropy.item() == 0.0
    assert empty.lse.item() == -math.inf
    assert not torch.isnan(empty.collision).any()


def test_chain_rule_and_local_entropies_by_brute_force() -> None:
    query, key = _inputs(3)
    rows = torch.tensor([5, 20, 36])
    visible = causal_visible(rows, 37)
    found = scale_entropy(query[:, :, rows], key, rows, scaling=0.7, visible=visible, edges=(0, 4, 16, 64))
    weights = _weights(query[:, :, rows], key, 0.7, visible)
    torch.testing.assert_close(found.entropy, -torch.xlogy(weights, weights).sum(-1), atol=1e-9, rtol=1e-9)
    for place, (low, high) in enumerate(((0, 4), (4, 16), (16, 64))):
        distance = rows[:, None] - torch.arange(37)
        inside = weights * ((distance >= low) & (distance < high))
        torch.testing.assert_close(found.mass[..., place], inside.sum(-1), atol=1e-12, rtol=1e-9)
        share = inside / inside.sum(-1, keepdim=True).clamp(min=1e-300)
        torch.testing.assert_close(
            found.within[..., place], -torch.xlogy(share, share).sum(-1), atol=1e-9, rtol=1e-9
        )
    between, within = found.variance()
    torch.testing.assert_close(between, found.between.var(2, unbiased=False))
    assert within.shape == (2, 4, 3)


def test_dyadic_edges_cover_every_distance() -> None:
    for length in (1, 63, 64, 65, 4096, 5000):
        edges = dyadic_edges(length)
        assert edges[0] == 0
        assert edges[-1] >= min(length, 64)
        assert edges[-1] >= length or length <= 64


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_mass_sparsity_against_brute_force(mass: float) -> None:
    query, key = _inputs(5)
    visible = causal_visible(torch.arange(37), 37)
    weights = _weights(query, key, 1.0, visible)
    found = mass_sparsity(query, key, mass, scaling=1.0, visible=visible)
    for row in (0, 7, 36):
        ordered = weights[0, 1, row].sort(descending=True).values
        count = next(k for k in range(1, 38) if ordered[:k].sum() >= mass * (1 - 1e-6))
        assert found[0, 1, row].item() == pytest.approx(count / (row + 1))


@given(seed=st.integers(0, 99), sinks=st.sampled_from([0, 1, 5]))
@settings(deadline=None, max_examples=15)
def test_profile_is_the_weight_outside_the_window(seed: int, sinks: int) -> None:
    query, key = _inputs(seed)
    rows = stratified_rows(37, 9)
    visible = causal_visible(rows, 37)
    found = mass_profile(
        query[:, :, rows], key, rows, scaling=0.5, windows=(4, 1, 16), sinks=sinks, visible=visible
    )
    assert found.windows == (1, 4, 16)
    weights = _weights(query[:, :, rows], key, 0.5, visible)
    for place, window in enumerate(found.windows):
        kept = causal_visible(rows, 37, window=window, sinks=sinks)
        torch.testing.assert_close(
            found.dropped[..., place], (weights * ~kept).sum(-1), atol=1e-12, rtol=1e-8
        )
    assert (found.mean().diff(dim=-1) <= 1e-12).all()
    assert (found.quantile(0.95) >= found.quantile(0.5)).all()
    assert found.quartiles().shape == (4, 3, 4)


def test_extrapolated_mass_grows_with_the_length() -> None:
    assert extrapolated_mass(0.005, 2048, 256, 2048) == pytest.approx(0.005)
    assert extrapolated_mass(0.005, 2048, 256, 32768) == pytest.approx(0.0834, abs=2e-3)
    with pytest.raises(ValueError, match="beyond the window"):
        extrapolated_mass(0.1, 100, 256, 1000)


def test_rows_are_stratified_and_deterministic() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = stratified_rows(1000, 10, generator)
    assert (rows // 100 == torch.arange(10)).all()
    assert torch.equal(rows, stratified_rows(1000, 10, torch.Generator().manual_seed(0)))
    assert torch.equal(stratified_rows(5, 10), torch.arange(5))
    assert stratified_rows(100, 5, first=50).min() >= 50
    with pytest.raises(ValueError, match="count"):
        stratified_rows(10, 0)
