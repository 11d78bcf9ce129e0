"""Spectra and rounding against dense linear algebra."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.attention import heads
from adaattn_hf.stats import spectrum

from ..support import statistics


def _qk(seed: int, n: int = 60, d: int = 12, heads: int = 4, kv: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
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
    energy = values[0].square()
    assert float(error) == pytest.approx(float((energy[rank:].sum() / energy.sum()).sqrt()), rel=1e-6, abs=1e-6)


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
    assert float(spectrum.effective_rank(flat)) == pytest.approx(5)
    assert float(spectrum.effective_rank(single)) == pytest.approx(1)
    assert int(spectrum.energy_rank(flat, 0.61)) == 4


@given(seed=st.integers(0, 999))
@settings(deadline=None, max_examples=20)
def test_int8_rounding_is_within_half_a_step_and_of_one_token(seed: int) -> None:
    tensor = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(seed)) * 5
    scale = tensor.abs().amax(dim=-1, keepdim=True) / heads.INT8_LEVELS
    assert ((heads.through_int8(tensor) - tensor).abs() <= scale / 2 + 1e-6).all()
    changed = tensor.clone()
    changed[:, 4:] += 100
    assert torch.equal(heads.through_int8(changed)[:, :4], heads.through_int8(tensor)[:, :4])
    assert heads.through_int8(torch.zeros(2, 4)).abs().max() == 0


def test_sqnr_orders_the_precisions_and_smoothing_helps_offset_keys() -> None:
    tensor = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    assert statistics.sqnr(tensor, tensor) == float("inf")
    bf16 = statistics.sqnr(tensor, heads.through_dtype(tensor, torch.bfloat16))
    fp16 = statistics.sqnr(tensor, heads.through_dtype(tensor, torch.float16))
    assert fp16 > bf16 + 15 > statistics.sqnr(tensor, heads.through_int8(tensor)) > 30
    offset = tensor.clone()
    offset[:, 0] += 20
    mean, centred = offset.mean(0), tensor - tensor.mean(0)
    smoothed = statistics.sqnr(centred, heads.through_int8(offset - mean))
    assert smoothed > statistics.sqnr(centred, heads.through_int8(offset) - mean) + 10
