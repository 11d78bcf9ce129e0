"""Keys and values as a cache stores them, read and written by the kernels of every instruction set."""

import contextlib
import functools

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.stored import (
    StoredKV,
    _matrix,
    cancelled,
    decode_scale,
    dequantise,
    direction_of,
    encode_scale,
    hadamard,
    quantise,
)
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native import launch
from adaattn_hf.backends.native.launch import rules_of
from adaattn_hf.backends.native.library import LEVELS, level_names
from adaattn_hf.backends.native.rules import Rules
from adaattn_hf.backends.native.storing import store

from ..support.statistics import sqnr

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tokens(seed: int, *shape: int) -> Tensor:
    """Keys with what makes them hard to store: a mean, an outlier channel and a large first token."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] = x[..., 3] * 8 + 20
    x[:, :, 0] *= 10
    return x


def stored(k: Tensor, v: Tensor, bits: int, extras: bool) -> tuple[Tensor, Tensor, StoredKV]:
    mean = (k @ hadamard(k.shape[3])).mean(2).contiguous() if extras else None
    keys, key_scale = quantise(k, mean=mean)
    values, value_scale = quantise(v, bits=bits)
    first = k[:, :, 0].contiguous() if extras else None
    return keys, values, StoredKV(key_scale, value_scale, mean, first)


def rules_over_codes(record: StoredKV, **more: object) -> Rules:
    x, codes = torch.zeros(2, 2, 1, 64), torch.zeros(2, 2, 1, 64, dtype=torch.int8)
    call = AttentionCall(x, codes, codes, MaskStructure(2, 1, 1), 1.0, stored=record)
    return rules_of(call, Rules(**more))  # type: ignore[arg-type]


@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("q_len", [1, 5, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("extras", [False, True], ids=["codes alone", "mean and first key"])
def test_attention_reads_what_is_stored(level: str, q_len: int, dtype: torch.dtype, bits: int, extras: bool) -> None:
    """Floor: 100 dB of what the codes stand for with fp32 queries, 40 dB in half precision."""
    q = torch.randn(2, 8, q_len, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    k, v = tokens(2, 2, 2, 900, 64), tokens(3, 2, 2, 900, 96)
    keys, values, record = stored(k, v, bits, extras)
    rules = rules_over_codes(record, causal=True, offset=900 - q_len)
    out, lse = launch.forward(q, keys, values, 0.02, rules, need_lse=True, level=LEVELS.index(level))
    structure = MaskStructure(2, q_len, 900, causal=True, q_offset=900 - q_len)
    dequantised = record.keys(keys, torch.float32), record.values(values, torch.float32)
    truth = reference.attention(AttentionCall(q.float(), *dequantised, structure, 0.02))
    assert lse is not None
    assert sqnr(truth.out, out) > (100 if dtype == torch.float32 else 40)
    torch.testing.assert_close(lse.double(), truth.lse, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=1e-5)


@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("q_len", [1, 70])
def test_scores_that_are_compared_with_others_get_their_mean_back(level: str, q_len: int) -> None:
    """Softcap, a bias and learned sinks see the scores themselves, not what softmax leaves of them."""
    q = torch.randn(1, 4, q_len, 32, generator=torch.Generator().manual_seed(1))
    k, v = tokens(2, 1, 2, 130, 32), tokens(3, 1, 2, 130, 32)
    keys, values, record = stored(k, v, 8, extras=True)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    rules = rules_over_codes(record, softcap=2.0, sink_logits=sinks)
    out, _ = launch.forward(q, keys, values, 0.05, rules, level=LEVELS.index(level))
    dequantised = record.keys(keys, torch.float32), record.values(values, torch.float32)
    wide = AttentionCall(q, *dequantised, MaskStructure(1, q_len, 130), 0.05, softcap=2.0, sink_logits=sinks)
    assert sqnr(reference.attention(wide).out, out) > 100


@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 96])
def test_storing_rounds_as_the_definition_does(level: str, bits: int, dtype: torch.dtype, dim: int) -> None:
    """The same codes but where a number lies between two of them to the last bit of a sum."""
    x = tokens(4, 2, 3, 40, dim).to(dtype)
    mean = (x.float() @ hadamard(dim)).mean(2).contiguous()
    codes, scale = quantise(x, bits=bits, mean=mean)
    ours = torch.zeros(2, 3, 50, codes.shape[3], dtype=codes.dtype)
    scales = torch.zeros(2, 3, 50, dtype=torch.uint8)
    store(x, ours[:, :, 5:45], scales[:, :, 5:45], mean=mean, level=LEVELS.index(level))
    assert (scales[:, :, 5:45] == scale).float().mean() > 0.99
    assert sqnr(dequantise(codes, scale), dequantise(ours[:, :, 5:45], scales[:, :, 5:45])) > 45
    assert not ours[:, :, :5].any()
    assert not ours[:, :, 45:].any()


@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("dim", [32, 64, 80])
def test_errors_cancel_along_the_mean_of_the_queries(level: str, dim: int) -> None:
    """The scores of queries that lie around a mean lose less than half of their rounding, and the others no more."""
    x, away = tokens(5, 2, 3, 200, dim), torch.randn(3, dim, generator=torch.Generator().manual_seed(6))
    around = torch.randn(2, 6, 100, dim, generator=torch.Generator().manual_seed(7))
    queries = around + 2 * away.repeat_interleave(2, 0)[None, :, None]
    mean = (x @ hadamard(dim)).mean(2).contiguous()
    along = direction_of(queries, 3)
    torch.testing.assert_close(along.norm(dim=2), torch.ones(2, 3))
    plain, plain_scale = quantise(x, mean=mean)
    wanted, scale = quantise(x, mean=mean, along=along)
    codes, scales = torch.zeros_like(wanted), torch.zeros_like(scale)
    store(x, codes, scales, mean=mean, along=along, level=LEVELS.index(level))
    # but where costs or neighbours are equal to the last bit of a sum
    assert (codes != wanted).any(3).float().mean() < 0.05
    assert sqnr(dequantise(wanted, scale), dequantise(codes, scales)) > 45

    def lost(codes: Tensor, scale: Tensor, q: Tensor) -> float:
        keys = StoredKV(scale, scale, mean).keys(codes, torch.float32).repeat_interleave(2, 1)
        return float(((keys - x.repeat_interleave(2, 1)) @ q.transpose(2, 3)).square().mean())

    for made, its in ((wanted, scale), (codes, scales)):
        assert lost(made, its, queries) < 0.5 * lost(plain, plain_scale, queries)
        assert lost(made, its, around) < 1.1 * lost(plain, plain_scale, around)
        assert int((made.short() - plain.short()).abs().max()) == 1
    peaks = torch.full((1, 1, 4, dim), 127.0)  # codes at the end of their range have one neighbour
    assert float(cancelled(peaks, peaks, torch.ones(1, 1, dim) / dim**0.5).max()) <= 127


@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_are_written_at_their_place_in_the_room_and_nowhere_else(bits: int) -> None:
    x = torch.randn(2, 3, 2, 64)
    codes = torch.full((2, 3, 9, 64 if bits == 8 else 32), 7, dtype=torch.int8 if bits == 8 else torch.uint8)
    scale = torch.full((2, 3, 9), 7, dtype=torch.uint8)
    store(x, codes, scale, at=4)
    expected, scales = quantise(x, bits=bits)
    assert (codes[:, :, 4:6].int() - expected.int()).abs().max() <= (1 if bits == 8 else 16)
    assert torch.equal(scale[:, :, 4:6], scales)
    assert all(rest.eq(7).all() for part in (codes, scale) for rest in (part[:, :, :4], part[:, :, 6:]))
    for at in (-1, 8):
        with pytest.raises(ValueError, match=f"place {at}, expected codes and scales with room"):
            store(x, codes, scale, at=at)


def test_storing_in_four_bits_needs_groups_of_channels() -> None:
    x = torch.randn(1, 1, 3, 16)
    with pytest.raises(RuntimeError, match="inconsistent extents"):
        store(x, torch.zeros(1, 1, 3, 8, dtype=torch.uint8), torch.zeros(1, 1, 3, dtype=torch.uint8))


def test_scales_are_not_below_what_they_stand_for_and_close_to_it() -> None:
    scale = torch.logspace(-5, 3, 4001)
    there = decode_scale(encode_scale(scale))
    assert bool((there >= scale).all())
    assert bool((there <= scale * 1.125).all())
    assert torch.equal(encode_scale(there), encode_scale(scale))
    assert decode_scale(encode_scale(torch.tensor([0.0]))).item() == 2.0**-20


def test_the_hadamard_matrix_is_its_own_inverse() -> None:
    for n in (7, 64, 96):
        torch.testing.assert_close(hadamard(n) @ hadamard(n), torch.eye(n))


@pytest.mark.parametrize("fake_first", [True, False])
def test_a_matrix_that_is_kept_is_not_that_of_a_mode(fake_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaattn_hf.attention.stored._kept_matrix", functools.cache(_matrix))
    for fake in (fake_first, not fake_first):
        with FakeTensorMode() if fake else contextlib.nullcontext():
            assert isinstance(quantise(torch.randn(1, 2, 8, 48))[0], FakeTensor) == fake


def test_a_matrix_kept_in_inference_mode_serves_gradients() -> None:
    n = 1 << 9  # of no other test: it is kept here
    with torch.inference_mode():
        hadamard(n)
    x = torch.ones(1, n, requires_grad=True)
    (x @ hadamard(n)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, hadamard(n).sum(1)[None])
