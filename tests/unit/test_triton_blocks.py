"""Kept blocks of keys in the Triton kernels, under Triton's interpreter, against the reference's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.blocks import picked_blocks
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure

from ..support.head_rules import rules
from .test_triton import interpreted, make

N = 450
LEFT = torch.ones(2, N, dtype=torch.bool)
LEFT[0, :133] = False
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([50, 300, 100]))[None]
STRUCTURES = {
    "causal": CallStructure(1, N, N, causal=True),
    "full": CallStructure(1, N, N),
    "suffix": CallStructure(1, 90, N, causal=True, q_offset=360),
    "left padding": CallStructure(2, N, N, causal=True, key_padding=LEFT, pads_queries=True),
    "documents": CallStructure(1, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "decode": CallStructure(2, 1, N, causal=True, q_offset=N - 1),
}


def check(request: AttentionRequest) -> None:
    """Equal to the definition; a row may keep a block more than it must, which few rows do."""
    from adaattn_hf.backends.triton.launch import attend

    result, truth = attend(request), reference.attention(request)
    assert result.lse is not None
    near = (result.lse.double() - truth.lse).abs().nan_to_num(0.0) < 2e-3
    assert near.double().mean() > 0.995
    rows = near.transpose(1, 2)
    torch.testing.assert_close(result.out.double()[rows], truth.out[rows], atol=4e-3, rtol=0)
    assert not (result.lse.double() < truth.lse - 2e-3).any()  # never one less


@interpreted
@pytest.mark.parametrize(
    ("name", "block"), [*((name, 64) for name in STRUCTURES), ("causal", 128), ("documents", 128)]
)
def test_equals_the_definition(name: str, block: int) -> None:
    request = make(STRUCTURES[name], 4, 2, 32, 32, per_head=rules((0, 0), (0, 70), (0.3, 0.9), block))
    check(request)
    if (name, block) == ("causal", 64):
        kept = picked_blocks(request, request.structure.segments()[0], 0.3, 0, [0], block)  # type: ignore[index]
        seen = sum(row // block + 1 for row in range(N))
        assert kept.sum() < 0.9 * seen  # there is something to leave out


@interpreted
def test_very_many_documents_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaattn_hf.backends.choice import launch
    from adaattn_hf.backends.triton import blocks, tables

    monkeypatch.setattr(launch, "GRID", 2)
    for module in (blocks, tables):
        monkeypatch.setattr(module, "MOST_ENTRIES", 4)
    check(make(STRUCTURES["documents"], 4, 2, 32, 32, per_head=rules((0, 0), (0, 70), (0.3, 0.9))))


@interpreted
def test_heads_with_windows_and_exact_heads_share_the_launch() -> None:
    check(make(STRUCTURES["causal"], 3, 3, 32, 32, per_head=rules((0, 100, 0), (0, 7, 0), (0.5, 0.0, 0.0))))


@interpreted
@pytest.mark.parametrize(
    "extra", [{"softcap": 1.5}, {"sink_logits": torch.tensor([0.5, -1.0])}], ids=["softcap", "sinks"]
)
def test_other_mathematics(extra: dict[str, Any]) -> None:
    check(make(STRUCTURES["causal"], 2, 2, 24, 40, per_head=rules((0, 0), (0, 3), (0.5, 0.8)), **extra))


@pytest.mark.parametrize("width", [32, 256, 512, 1024, 2048])
def test_rows_of_a_program_fit_registers(width: int) -> None:
    pytest.importorskip("triton")
    from adaattn_hf.backends.choice.launch import choice_tile

    rows, warps, _ = choice_tile(width)
    assert rows * width <= 128 * 32 * warps <= 128 * 32 * 16


def test_more_blocks_than_fit_are_an_error() -> None:
    pytest.importorskip("triton")
    from adaattn_hf.backends.choice.launch import choice_tile

    with pytest.raises(ValueError, match="at most 2048"):
        choice_tile(4096)
