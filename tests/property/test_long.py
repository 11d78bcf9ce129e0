"""Sequences far longer than those that property tests draw: right in sampled rows, and memory that grows with them."""

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import BACKENDS, attend
from adaattn_hf.eval.timing import peak_bytes

from ..support.calls import attended


def drawn(length: int, head_dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, 1, length, head_dim, generator=generator) for _ in range(3))
    return query, key, value


@pytest.mark.parametrize(("length", "window"), [(8192, None), (8192, 1000), (32768, None)])
@pytest.mark.parametrize("name", ["native", "sdpa"])
def test_sampled_rows_of_long_sequences_are_right(name: str, length: int, window: int | None) -> None:
    query, key, value = drawn(length)
    structure = MaskStructure(1, length, length, causal=True, window=window)
    call = AttentionCall(query, key, value, structure, 0.125)
    if BACKENDS[name].missing():
        pytest.skip(BACKENDS[name].missing()[0])
    with torch.no_grad():
        out = attend(call, name).out
    for row in (0, 1, 4095, length // 2 + 3, length - 2, length - 1):
        one = MaskStructure(1, 1, length, causal=True, q_offset=row, window=window)
        asked = AttentionCall(query[:, :, row : row + 1], key, value, one, 0.125)
        torch.testing.assert_close(out[:, row].double(), reference.attention(asked).out[:, 0], atol=1e-5, rtol=0)


def relative_error(name: str, length: int, dtype: torch.dtype) -> float:
    """Of the last 64 rows, which see nearly all keys, against double precision on the same rounded numbers."""
    query, key, value = (tensor.to(dtype) for tensor in drawn(length))
    structure = MaskStructure(1, length, length, causal=True)
    with torch.no_grad():
        out = attended(BACKENDS[name], AttentionCall(query, key, value, structure, 0.125)).out[:, -64:].double()
    last = MaskStructure(1, 64, length, causal=True, q_offset=length - 64)
    truth = reference.attention(AttentionCall(query[:, :, -64:], key, value, last, 0.125)).out
    return float((out - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["native", "sdpa"])
def test_errors_grow_no_faster_than_the_root_of_the_length(name: str, dtype: torch.dtype) -> None:
    """Roundings are summed that have nothing to do with one another."""
    if BACKENDS[name].missing():
        pytest.skip(BACKENDS[name].missing()[0])
    short, long = (relative_error(name, length, dtype) for length in (1024, 16384))
    assert 0 < long <= 16**0.5 * 1.1 * short


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_memory_grows_with_the_length_and_not_with_its_square(gradient: bool) -> None:
    """Bytes at the peak, the kernels' own buffers among them, from 1,024 to 8,192 tokens: exponent 1."""

    def peak(length: int) -> int:
        tensors = [t.requires_grad_(gradient) for t in drawn(length)]
        call = AttentionCall(*tensors, MaskStructure(1, length, length, causal=True), 0.125)

        def work() -> object:
            out = attend(call).out
            return torch.autograd.grad(out.sum(), tensors) if gradient else out

        work()
        return peak_bytes(work, torch.device("cpu"))[0]

    short, long = peak(1024), peak(8192)
    assert short > 1024 * 64 * 4  # the output alone
    assert long <= 8 * 1.25 * short
