"""Decode over a cache of codes in the Triton kernels, under Triton's interpreter, against what the codes mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.request import AttentionRequest, CallSpec
from adaattn_hf.attention.stored import StoredKV, hadamard, quantise
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.select import order
from adaattn_hf.backends.triton import TritonBackend

from ..support.head_rules import rules
from .test_triton import LEFT, STRUCTURES, N, interpreted, make

LONG = CallStructure(2, 1, 1500, causal=True, q_offset=1499)
STEPS = [name for name, structure in STRUCTURES.items() if structure.q_len == 1]


def stored(
    request: AttentionRequest, bits: int, *, mean: bool = True, first: bool = True, turned: bool = True
) -> Any:
    """The request over codes of its keys, as a cache makes them."""
    key, value = request.key.float(), request.value.float()
    middle = key.mean(dim=2) * 3
    own = (middle @ hadamard(key.shape[3]) if turned else middle).contiguous() if mean else None
    keys, key_scale = quantise(key, mean=own, rotated=turned)
    values, value_scale = quantise(value, bits=bits, rotated=turned)
    record = StoredKV(key_scale, value_scale, own, key[:, :, 0].contiguous() if first else None, turned)
    return AttentionRequest(
        request.query, keys, values, request.structure, request.scaling, softcap=request.softcap,
        sink_logits=request.sink_logits, need_lse=True, per_head=request.per_head, stored=record,
    )  # fmt: skip


def check(request: AttentionRequest, bits: int, atol: float = 2e-5, **how: bool) -> None:
    from adaattn_hf.backends.triton.launch import attend

    asked = stored(request, bits, **how)
    result, truth = attend(asked), reference.attention(asked.widened())
    torch.testing.assert_close(result.out.double(), truth.out, atol=atol, rtol=0)
    assert result.lse is not None
    assert result.out.dtype is request.query.dtype
    torch.testing.assert_close(result.lse.double(), truth.lse, atol=atol, rtol=0)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", STEPS)
def test_every_step_reads_codes(name: str, bits: int) -> None:
    check(make(STRUCTURES[name], 4, 2, 32, 64, torch.float32), bits)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "how",
    [{"mean": False}, {"first": False}, {"turned": False}, {"mean": False, "first": False, "turned": False}],
    ids=str,
)
def test_without_a_mean_a_first_key_or_a_turn(how: dict[str, bool], bits: int) -> None:
    check(make(STRUCTURES["padded decode"], 6, 2, 48, 32, torch.float32), bits, **how)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
def test_shares_of_heads_with_windows_of_their_own(bits: int) -> None:
    check(make(LONG, 4, 2, 32, 32, torch.float32, per_head=rules((300, 0), (7, 0))), bits)


@interpreted
@pytest.mark.parametrize(
    "extra", [{"softcap": 1.5}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=str
)
def test_a_mean_is_not_lost_where_a_shift_of_all_scores_counts(extra: dict[str, Any]) -> None:
    check(make(STRUCTURES["decode"], 4, 2, 32, 32, torch.float32, **extra), 8)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
def test_half_precision(bits: int) -> None:
    """The interpreter has no bfloat16; `tests/gpu` has."""
    check(make(STRUCTURES["decode"], 4, 2, 32, 32), bits, 1e-2)


def test_what_is_served_and_what_is_refused() -> None:
    def reasons(structure: CallStructure, bits: int = 8) -> str:
        asked = stored(make(structure, 4, 2, 32, 32), bits)
        return " ".join(TritonBackend().refusals(CallSpec.of(asked)._replace(device="cuda")))

    assert reasons(STRUCTURES["decode"]) == ""
    spec = CallSpec.of(stored(make(STRUCTURES["decode"], 4, 2, 32, 32), 8))._replace(device="cuda")
    assert order(spec)[0] == "triton"
    assert order(spec._replace(head_windows=True))[0] == "triton"
    assert reasons(CallStructure(2, 1, N, causal=True, q_offset=N - 1, key_padding=LEFT), 4) == ""
    assert "stored as int8 for one query" in reasons(STRUCTURES["suffix"])
