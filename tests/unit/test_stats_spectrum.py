"""Spectra, probes, noise and certificates against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.stats import certificate, noise, probes, spectrum


def _qk(
    seed: int, n: int = 60, d: int = 12, heads: int = 4, kv: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    decay = torch.linspace(0, -3, d).exp()
    query = torch.randn(1, heads, n, d, generator=generator) * decay
    return query, torch.randn(1, kv, n, d, generator=generator) + 2.0


@given(seed=st.integers(0, 999))
@settings(deadline=None, max_examples=15)
def test_gram_spectrum_equals_the_singular_values_of_the_scores(seed: int) -> None:
    query, key = _qk(seed)
    found = spectrum.score_spectrum(spectrum.gram(query, key))
    for head in range(2):
        stacked = query[0, 2 * head : 2 * head + 2].reshape(-1, 12).double()
        dense = torch.linalg.svdvals(stacked @ key[0, head].double().T)[:12]
        torch.testing.assert_close(found[head], dense, rtol=1e-6, atol=1e-6 * float(dense[0]))


@pytest.mark.parametrize("rank", [1, 4, 8, 12])
def test_factors_are_the_best_of_their_rank(rank: int) -> None:
    query, key = _qk(1)
    moments = spectrum.gram(query, key)
    left, right = spectrum.score_factors(moments, rank)
    values = spectrum.score_spectrum(moments)
    rows, keys = query[0, :2].reshape(-1, 12).double(), key[0, 0].double()
    scores = rows @ keys.T
    error = (scores - (rows @ left[0]) @ (keys @ right[0]).T).norm() / scores.norm()
    assert float(error) == pytest.approx(
        float(spectrum.relative_residual(values, rank)[0]), rel=1e-6, abs=1e-6
    )


def test_moments_merge_and_centre() -> None:
    query, key = _qk(2)
    whole = spectrum.gram(query, key)
    parts = spectrum.gram(query[:, :, :20], key[:, :, :20]) + spectrum.gram(query[:, :, 20:], key[:, :, 20:])
    torch.testing.assert_close(whole.key, parts.key)
    torch.testing.assert_close(whole.key_mean, key[0].double().mean(1))
    moved = key[0].double() - key[0].double().mean(1, keepdim=True)
    torch.testing.assert_close(whole.centred().key, moved.mT @ moved)


def test_ranks_of_known_spectra() -> None:
    flat, single = torch.ones(5, dtype=torch.float64), torch.tensor([3.0, 0, 0], dtype=torch.float64)
    assert float(spectrum.stable_rank(flat)) == pytest.approx(5)
    assert float(spectrum.effective_rank(flat)) == pytest.approx(5)
    assert float(spectrum.effective_rank(single)) == pytest.approx(1)
    assert int(spectrum.energy_rank(flat, 0.61)) == 4
    with pytest.raises(ValueError, match="rank is 13"):
        spectrum.score_factors(spectrum.gram(*_qk(0)), 13)


def test_hutchinson_is_unbiased() -> None:
    matrix = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means = []
    for seed in range(400):
        mean, error = probes.hutchinson_trace(
            lambda x: matrix @ x, 30, 8, torch.Generator().manual_seed(seed)
        )
        means.append(mean)
        assert error > 0
    values = torch.tensor(means)
    assert abs(float(values.mean()) - float(matrix.trace())) < 3 * float(values.std()) / 20


def test_frobenius_power_and_range() -> None:
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    matrix = left @ torch.randn(4, 50, generator=generator, dtype=torch.float64)
    other = torch.randn(50, 50, generator=generator, dtype=torch.float64)
    found = probes.frobenius_distance(lambda x: matrix @ x, lambda x: other @ x, 50, 4000, generator)
    assert found == pytest.approx(float((matrix - other).norm()), rel=0.05)
    value, vector = probes.power_iteration(lambda x: matrix @ x, lambda x: matrix.T @ x, 50, tolerance=1e-12)
    assert value == pytest.approx(float(torch.linalg.svdvals(matrix)[0]), rel=1e-4)
    assert float((matrix @ vector).norm()) == pytest.approx(value)
    basis = probes.range_finder(lambda x: matrix @ x, lambda x: matrix.T @ x, 50, 4, generator, oversample=2)
    assert float((matrix - basis @ (basis.T @ matrix)).norm()) < 1e-8 * float(matrix.norm())


@given(seed=st.integers(0, 999))
@settings(deadline=None, max_examples=20)
def test_int8_rounding_is_within_half_a_step_and_of_one_token(seed: int) -> None:
    tensor = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(seed)) * 5
    codes, scale = noise.quantise(tensor)
    assert ((codes * scale - tensor).abs() <= scale / 2 + 1e-6).all()
    changed = tensor.clone()
    changed[:, 4:] += 100
    assert torch.equal(noise.through_int8(changed)[:, :4], noise.through_int8(tensor)[:, :4])
    assert noise.through_int8(torch.zeros(2, 4)).abs().max() == 0


def test_predicted_noise_matches_measured() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(256, 64, generator=generator), torch.randn(300, 64, generator=generator)
    true = query @ key.T / 8
    noisy = noise.through_int8(query) @ noise.through_int8(key).T / 8
    predicted = noise.logit_noise_variance(query, key, 1 / 8).mean()
    assert float((noisy - true).var()) == pytest.approx(float(predicted), rel=0.15)
    weights, value = torch.softmax(true, -1), torch.randn(300, 64, generator=generator)
    output = weights @ value
    changes = []
    for _ in range(40):
        shaken = torch.softmax(true + 0.02 * torch.randn(true.shape, generator=generator), -1) @ value
        changes.append((shaken - output).square().sum(-1))
    measured = float(torch.stack(changes).mean())
    assert measured == pytest.approx(
        float(noise.output_noise(weights, value, output, 0.02**2).mean()), rel=0.1
    )


def test_sqnr_orders_the_precisions_and_smoothing_helps_offset_keys() -> None:
    tensor = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    assert noise.sqnr(tensor, tensor) == float("inf")
    bf16 = noise.sqnr(tensor, noise.through_dtype(tensor, torch.bfloat16))
    fp16 = noise.sqnr(tensor, noise.through_dtype(tensor, torch.float16))
    assert fp16 > bf16 + 15 > noise.sqnr(tensor, noise.through_int8(tensor)) > 30
    offset = tensor.clone()
    offset[:, 0] += 20
    mean = offset.mean(0)
    assert (
        noise.sqnr(tensor - tensor.mean(0), noise.through_int8(offset - mean))
        > noise.sqnr(tensor - tensor.mean(0), noise.through_int8(offset) - mean) + 10
    )
    assert int(noise.crest_factor(offset)[0] < 3)


@given(seed=st.integers(0, 9999), size=st.floats(0.01, 20.0))
@settings(deadline=None, max_examples=60)
def test_certificate_bounds_every_perturbation(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, 11, generator=generator, dtype=torch.float64) * 4
    shake = torch.randn(5, 11, generator=generator, dtype=torch.float64) * size
    value = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    visible = torch.rand(5, 11, generator=generator) < 0.7
    visible[:, 0] = True
    hidden = scores.masked_fill(~visible, -torch.inf)
    before, after = torch.softmax(hidden, -1), torch.softmax(hidden + shake, -1)
    assert ((before - after).abs().sum(-1) <= certificate.weight_bound(shake, visible) + 1e-12).all()
    error = ((before - after) @ value).norm(dim=-1)
    assert (error <= certificate.output_bound(shake, value, visible) + 1e-12).all()
    shifted = shake + torch.randn(5, 1, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        certificate.weight_bound(shifted, visible), certificate.weight_bound(shake, visible)
    )


def test_dropped_mass_bound_holds_and_is_not_vacuous() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, value = torch.randn(4, 20, generator=generator), torch.randn(20, 3, generator=generator)
    kept = scores.masked_fill(torch.arange(20) < 10, -torch.inf)
    error = (torch.softmax(scores, -1) @ value - torch.softmax(kept, -1) @ value).norm(dim=-1)
    bound = certificate.dropped_mass_bound(kept.logsumexp(-1), scores.logsumexp(-1), value)
    assert (error <= bound).all()
    assert (error > 0.02 * bound).any()
