"""Errors against double precision are in the order of the dtypes, at every stage of every backend."""

import itertools
from dataclasses import replace

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.backends.select import BACKENDS
from studies import errors

LARGEST = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Relative: some roundings of each dtype."""


@pytest.mark.parametrize("stage", errors.STAGES)
@pytest.mark.parametrize("backend", errors.NAMES)
def test_errors_are_in_the_order_of_the_dtypes(backend: str, stage: str) -> None:
    if backend != "triton" and (missing := BACKENDS[backend].missing()):
        pytest.skip("; ".join(missing))
    if backend == "triton":
        pytest.importorskip("triton")
    found = [cell for dtype in errors.DTYPES if (cell := errors.measure(backend, dtype, stage)) is not None]
    if not found:
        pytest.skip(f"{backend} does not serve {stage}")
    relative = [cell.relative for cell in found]
    assert relative == sorted(relative)
    assert all(small * 2 < large for small, large in itertools.pairwise(relative))
    assert all(cell.relative < LARGEST[cell.dtype] for cell in found)
    assert all(abs(cell.sqnr + 20 * torch.tensor(cell.relative).log10()) < 0.1 for cell in found)


def test_weights_are_right_at_scores_of_60000_in_half_precision() -> None:
    source = torch.Generator().manual_seed(5)
    query, key = (torch.randn(1, heads, 33, 64, generator=source).mul(60).half() for heads in (4, 2))
    value = torch.randn(1, 2, 33, 64, generator=source).half()
    asked = AttentionCall(query, key, value, MaskStructure(1, 33, 33, causal=True), 1.0)
    assert (query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3)).abs().max() > 6e4
    weights = attention_weights(asked)
    assert torch.isfinite(weights).all()
    # weighted by unit vectors as values, the output is the weights
    unit = torch.eye(33, dtype=torch.float16).expand(1, 2, 33, 33)
    truth = reference.attention(replace(asked, value=unit)).out.transpose(1, 2)
    assert (weights.double() - truth).abs().max() < 2e-3
    torch.testing.assert_close(weights.double().sum(3), torch.ones(1, 4, 33, dtype=torch.float64), atol=2e-3, rtol=0)


def test_the_page_has_a_line_for_every_cell() -> None:
    cell = errors.measure("eager", "float32", "decode")
    assert cell is not None
    origin = {"cpu": "a processor", "versions": {"torch": "2"}, "commit": None, "device": "cpu", "driver": None}
    assert "| `eager` | decode | float32 |" in errors.table([cell], origin)
    assert "Triton's kernels in its interpreter" in errors.table([cell], origin)
    on = {**origin, "device": "a GPU", "driver": "CUDA 13"}
    assert "Triton's kernels on a GPU (CUDA 13)" in errors.table([cell], on)
