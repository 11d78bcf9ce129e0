"""Rounding tokens into a cache by the Triton kernel, under Triton's interpreter, against the definition."""

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention.stored import StoredKV, dequantise, direction_of, hadamard, quantise

from .test_triton import interpreted


def tokens(count: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[2, 3, count, dim]` with an outlying channel, as attention hands them over: heads behind tokens in memory."""
    drawn = torch.randn(2, count, 3, dim, generator=torch.Generator().manual_seed(count))
    drawn[..., 1] *= 20
    return drawn.to(dtype).transpose(1, 2)


def stored(x: Tensor, bits: int, at: int | Tensor, spare: int = 3, **more: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, in a room that is otherwise full of sevens, of keys; of 4 bits, of values that are the same."""
    from adaattn_hf.backends.triton.storing import store

    room = int(at) + x.shape[2] + spare
    width, dtype = (x.shape[3], torch.int8) if bits == 8 else (x.shape[3] // 2, torch.uint8)
    shapes = ((room, x.shape[3]), torch.int8), ((room,), torch.uint8), ((room, width), dtype), ((room,), torch.uint8)
    parts = [torch.full((2, 3, *shape), 7, dtype=dtype) for shape, dtype in shapes]
    store(x, x, parts, at=at, **more)
    if bits == 8 and not more:
        assert torch.equal(parts[0], parts[2])
    codes, scale = parts[:2] if bits == 8 else parts[2:]
    return codes, scale


@interpreted
@pytest.mark.parametrize(("dtype", "bits", "dim", "count"), [
    ((torch.float32, torch.bfloat16)[(at + count) % 2], bits, dim, count)
    for at, (bits, dim) in enumerate([(8, 8), (8, 64), (8, 80), (8, 96), (8, 256), (4, 32), (4, 96), (4, 128)])
    for count in (1, 16, 37)
])  # fmt: skip
def test_rounds_by_the_definition_and_writes_nothing_else(dtype: torch.dtype, bits: int, dim: int, count: int) -> None:
    x = tokens(count, dim, dtype)
    mean = (x.float() @ hadamard(dim)).mean(2).contiguous() if count > 1 and bits == 8 else None
    codes, scale = quantise(x, bits=bits, mean=mean)
    ours, scales = stored(x, bits, 5, **({} if mean is None else {"mean": mean}))
    inside = slice(5, 5 + count)
    assert (scales[:, :, inside] == scale).float().mean() > 0.98  # but where a peak lies between two of them
    same = scales[:, :, inside] == scale
    apart = (dequantise(ours[:, :, inside], scale) - dequantise(codes, scale)).abs().amax(3)
    # a code may differ where a number lies between two to the last bit of a sum
    assert (apart == 0)[same].float().mean() > 0.95
    step = dequantise(torch.ones_like(codes) if bits == 8 else torch.full_like(codes, 0x88), scale).amax(3)
    assert (apart <= 2.001 * step)[same].all()
    assert all(rest.eq(7).all() for part in (ours, scales) for rest in (part[:, :, :5], part[:, :, 5 + count :]))


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
def test_tokens_may_be_counted_on_the_device(bits: int) -> None:
    """The count is read and raised; of a token that has no room nothing is written, and none is counted."""
    x, held = tokens(1, 64), torch.tensor(5)
    for ours, expected in zip(stored(x, bits, held), stored(x, bits, 5), strict=True):
        assert torch.equal(ours, expected)
    assert held == 6
    assert all(part.eq(7).all() for part in stored(x, bits, held, spare=-1))
    assert held == 6


@interpreted
def test_tokens_go_round_a_ring_behind_its_first_ones() -> None:
    """Of six slots two stay: the eleventh token lies where the seventh did; beyond what may come nothing is written."""
    from adaattn_hf.backends.triton.storing import store

    held, drawn = torch.tensor(0), tokens(13, 64)
    shapes = ((64,), torch.int8), ((), torch.uint8), ((64,), torch.int8), ((), torch.uint8)
    parts = [torch.zeros(2, 3, 6, *more, dtype=dtype) for more, dtype in shapes]
    for place in range(13):
        store(*[drawn[:, :, place : place + 1]] * 2, parts, at=held, ring=(2, 12))
    assert held == 12
    wanted, scale = stored(drawn, 8, 0, spare=0)
    slots = [0, 1, 10, 11, 8, 9]
    assert torch.equal(parts[0], wanted[:, :, slots])
    assert torch.equal(parts[3], scale[:, :, slots])


@interpreted
def test_keys_are_rounded_again_alone() -> None:
    from adaattn_hf.backends.triton.storing import store

    x = tokens(20, 64)
    parts = torch.empty(2, 3, 20, 64, dtype=torch.int8), torch.empty(2, 3, 20, dtype=torch.uint8)
    store(x, None, parts)
    for ours, expected in zip(parts, stored(x, 8, 0, spare=0), strict=True):
        assert torch.equal(ours, expected)


@interpreted
@pytest.mark.parametrize("dim", [32, 80])
def test_errors_cancel_along_the_mean_of_the_queries(dim: int) -> None:
    x = tokens(60, dim)
    away = torch.randn(3, dim, generator=torch.Generator().manual_seed(6)).repeat_interleave(2, 0)
    queries = torch.randn(2, 6, 100, dim, generator=torch.Generator().manual_seed(7)) + 2 * away[None, :, None]
    along = direction_of(queries, 3)
    plain, plain_scale = quantise(x)
    wanted, _ = quantise(x, along=along)
    codes, scale = (part[:, :, 2:62] for part in stored(x, 8, 2, along=along))
    assert (codes != wanted).any(3).float().mean() < 0.05

    def lost(codes: Tensor, scale: Tensor) -> float:
        keys = StoredKV(scale, scale).keys(codes, torch.float32).repeat_interleave(2, 1)
        return float(((keys - x.repeat_interleave(2, 1)) @ queries.transpose(2, 3)).square().mean())

    assert lost(codes, scale) < 0.5 * lost(plain, plain_scale)


@interpreted
def test_what_the_kernel_does_not_serve_is_told() -> None:
    from adaattn_hf.backends.triton.storing import serves

    codes, fours = torch.empty(0, dtype=torch.int8), torch.empty(0, dtype=torch.uint8)
    assert serves(tokens(1, 80), codes)
    assert not serves(tokens(1, 80), fours)
    assert not serves(tokens(1, 288), codes)
    assert not serves(tokens(1, 64).double(), codes)
