"""Statistics of sampled rows against brute force on the full matrix; spectra and rounding against linear algebra."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.attention import heads, stored
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.stats import profile, spectrum
from adaattn_hf.stats.profile import stratified_rows

from ..support.statistics import causal_visible, sqnr


def drawn(seed: int, heads: int = 4, kv_heads: int = 2, n: int = 137, d: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, n, d, generator=generator) * 3
    return query, *(torch.randn(kv_heads, n, d, generator=generator) for _ in range(2))


def call_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False) -> AttentionCall:
    structure = MaskStructure(1, query.shape[1], key.shape[1], causal)
    return AttentionCall(query[None], key[None], value[None], structure, 0.3)


def weights_of(query: torch.Tensor, key: torch.Tensor, scaling: float, visible: torch.Tensor) -> torch.Tensor:
    scores = query @ key.repeat_interleave(query.shape[0] // key.shape[0], dim=0).mT * scaling
    return torch.softmax(scores.masked_fill(~visible, -math.inf), -1)


def blocks_by_hand(row: torch.Tensor, share: float) -> float:
    """Blocks of 64 keys, largest first, until they hold the share; of the blocks that the row sees."""
    sums = sorted((float(part.sum()) for part in row.split(64)), reverse=True)
    count, held = 0, 0.0
    while held < share * (1 - 1e-6):
        held += sums[count]
        count += 1
    return count / sum(1 for part in row.split(64) if bool((part > 0).any()))


@given(seed=st.integers(0, 999), scaling=st.sampled_from([0.1, 0.5]))
@settings(deadline=None, max_examples=10)
def test_row_statistics_by_brute_force(seed: int, scaling: float) -> None:
    query, key, _ = drawn(seed)
    rows = torch.tensor([0, 5, 70, 136])
    visible = causal_visible(rows, 137)
    weights = weights_of(query[:, rows], key, scaling, visible)
    found = profile.row_statistics(weights, visible, rows)
    for head in range(4):
        for place, position in enumerate(rows.tolist()):
            row = weights[head, place].double()
            entropy = -sum(float(p) * math.log(float(p)) for p in row if p > 0)
            assert float(found["entropy"][head, place]) == pytest.approx(entropy, abs=1e-5)
            assert float(found["support"][head, place]) == pytest.approx(math.exp(entropy), rel=1e-5)
            assert int(found["keys"][head, place]) == position + 1
            assert float(found["sink_mass"][head, place]) == pytest.approx(float(row[:4].sum()), abs=1e-6)
            for share in (0.95, 0.99):
                density = float(found[f"block_density_{round(100 * share)}"][head, place])
                assert density == pytest.approx(blocks_by_hand(row, share))
            near = [p for p in range(137) if position - p in range(16)]
            assert float(found["distance_mass"][head, place, 0]) == pytest.approx(float(row[near].sum()), abs=1e-6)
            assert float(found["distance_mass"][head, place].sum()) == pytest.approx(1.0, abs=1e-5)


def test_uniform_one_hot_and_empty_rows() -> None:
    weights = torch.zeros(1, 3, 256)
    weights[0, 0] = 1 / 256
    weights[0, 1, 200] = 1.0
    visible = torch.tensor([True, True, False])[:, None].expand(3, 256)[None]
    found = profile.row_statistics(weights, visible, torch.tensor([255, 255, 255]))
    assert found["entropy"][0].tolist() == pytest.approx([math.log(256), 0.0, 0.0], rel=1e-5)
    assert found["block_density_99"][0].tolist() == [1.0, 0.25, 0.0]
    assert found["keys"][0].tolist() == [256, 256, 0]
    assert found["distance_mass"][0, 1].tolist() == [0, 1, 0, 0, 0, 0, 0]  # 55 keys back
    assert found["sink_mass"][0].tolist() == pytest.approx([4 / 256, 0, 0])
    # sinks are those of the own document
    weights = torch.full((1, 1, 40), 1 / 20)
    visible = (torch.arange(40) >= 20)[None, None]
    found = profile.row_statistics(weights * visible, visible, torch.tensor([39]))
    assert float(found["sink_mass"]) == pytest.approx(4 / 20)


def test_sums_do_not_depend_on_how_many_rows_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (query, key, value), rows = drawn(3), torch.arange(0, 137, 3)
    visible = causal_visible(rows, 137)[None]
    arguments = call_of(query[:, rows], key, value), 0, visible, rows
    whole = profile.head_sums(*arguments)
    monkeypatch.setattr(profile, "_CHUNK_ELEMENTS", 4 * 137 * 5)
    monkeypatch.setattr(profile, "row_statistics", pieces := Mock(wraps=profile.row_statistics))
    parts = profile.head_sums(*arguments)
    assert pieces.call_count == 10  # of 5 rows each
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values, rtol=1e-5, atol=1e-7)
    weights = weights_of(query[:, rows], key, 0.3, visible[0]).double()
    spread = -torch.xlogy(weights, weights).sum(-1)
    torch.testing.assert_close(
        profile.means(parts)["entropy_deviation"], spread.std(-1, correction=0), rtol=1e-4, atol=0
    )


def test_noise_is_that_of_the_outputs() -> None:
    query, key, value = drawn(4)
    rows = torch.arange(137)
    visible = causal_visible(rows, 137)
    wide_key, wide_value = (t.repeat_interleave(2, dim=0) for t in (key, value))
    exact = weights_of(query, key, 0.3, visible) @ wide_value
    rounded = [t.bfloat16().float() for t in (query, wide_key, wide_value)]
    bf16 = weights_of(rounded[0], rounded[1], 0.3, visible) @ rounded[2]
    answer = exact + 0.01
    sums = profile.head_sums(call_of(query, key, value), 0, visible[None], rows, answer)
    found = profile.means(sums)
    for head in range(4):
        assert float(found["sqnr_bf16"][head]) == pytest.approx(sqnr(exact[head], bf16[head]), abs=0.05)
        assert float(found["sqnr_answer"][head]) == pytest.approx(sqnr(exact[head], answer[head]), abs=0.05)
        assert 20 < float(found["sqnr_int8"][head]) < float(found["sqnr_bf16"][head]) + 30


def test_learned_sinks_take_their_share() -> None:
    query, key, value = torch.zeros(1, 1, 4), torch.zeros(1, 3, 4), torch.ones(1, 3, 4)
    visible = torch.ones(1, 1, 3, dtype=torch.bool)
    call = replace(call_of(query, key, value), sink_logits=torch.zeros(1))
    sums = profile.head_sums(call, 0, visible, torch.tensor([2]), torch.full((1, 1, 4), 0.75))
    assert float(sums["learned_sink"]) == pytest.approx(0.25)
    assert float(sums["noise_answer"]) == pytest.approx(0.0, abs=1e-12)


def test_a_pooled_map_is_the_mean_of_its_pixels() -> None:
    query, key, _ = drawn(5, heads=1, kv_heads=1, n=480)
    visible = causal_visible(torch.arange(480), 480)
    image = profile.pooled_weights(call_of(query, key, key, causal=True), 0, (8, 12))
    by_hand = weights_of(query, key, 0.3, visible)[0].double().view(8, 60, 12, 40).sum(-1).mean(1)
    torch.testing.assert_close(image, by_hand, rtol=1e-5, atol=1e-7)


def test_sampled_rows_tell_what_all_rows_do() -> None:
    """Mean entropy of 32 rows of 1,024 over 40 seeds, strata against any rows: the truth in the middle, and nearer."""
    query, key, _ = drawn(0, heads=1, kv_heads=1, n=1024)
    every = torch.arange(1024)
    visible = causal_visible(every, 1024)
    entropy = profile.row_statistics(weights_of(query, key, 0.1, visible), visible, every)["entropy"][0].double()
    truth, spread = float(entropy.mean()), float(entropy.std()) / math.sqrt(32)
    seeds = [torch.Generator().manual_seed(seed) for seed in range(40)]
    strata = torch.stack([entropy[stratified_rows(1024, 32, seed)].mean() for seed in seeds]) - truth
    anywhere = torch.stack([entropy[torch.randperm(1024, generator=seed)[:32]].mean() for seed in seeds]) - truth
    assert float(strata.abs().quantile(0.95)) < spread
    assert abs(float(strata.mean())) < 2 * float(strata.std()) / math.sqrt(40)
    assert float(strata.square().mean()) < 0.7 * float(anywhere.square().mean())
    assert abs(float(entropy[:64].mean()) - truth) > 2 * spread, "the first 64 rows would not do"


def test_rows_are_stratified_and_deterministic() -> None:
    drawn_rows = stratified_rows(1000, 10, torch.Generator().manual_seed(0))
    assert drawn_rows.tolist() == stratified_rows(1000, 10, torch.Generator().manual_seed(0)).tolist()
    assert [int(r) // 100 for r in drawn_rows] == list(range(10))
    assert stratified_rows(5, 10, torch.Generator()).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="at least 1 row"):
        stratified_rows(5, 0, torch.Generator())


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
    scale = tensor.abs().amax(dim=-1, keepdim=True) / stored.INT8_LEVELS
    assert ((heads.through_int8(tensor) - tensor).abs() <= scale / 2 + 1e-6).all()
    changed = tensor.clone()
    changed[:, 4:] += 100
    assert torch.equal(heads.through_int8(changed)[:, :4], heads.through_int8(tensor)[:, :4])
    assert heads.through_int8(torch.zeros(2, 4)).abs().max() == 0


def test_sqnr_orders_the_precisions_and_smoothing_helps_offset_keys() -> None:
    tensor = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    assert sqnr(tensor, tensor) == float("inf")
    bf16 = sqnr(tensor, heads.through_dtype(tensor, torch.bfloat16))
    fp16 = sqnr(tensor, heads.through_dtype(tensor, torch.float16))
    assert fp16 > bf16 + 15 > sqnr(tensor, heads.through_int8(tensor)) > 30
    offset = tensor.clone()
    offset[:, 0] += 20
    mean, centred = offset.mean(0), tensor - tensor.mean(0)
    smoothed = sqnr(centred, heads.through_int8(offset - mean))
    assert smoothed > sqnr(centred, heads.through_int8(offset) - mean) + 10
