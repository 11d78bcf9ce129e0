"""NaN and infinity come out where torch's attention lets them out: in every backend, precision and instruction set."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.reference import attention
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.native import launch
from adaattn_hf.backends.native.library import LEVELS, level_names, missing
from adaattn_hf.backends.native.rules import Rules

from ..support.calls import ON_CPU

BACKENDS = [name for name in ON_CPU if name != "native" or not missing()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 7), (9, 9), (1, 40), (3, 300), (40, 40), (130, 1100)]


def poisoned(where: str, what: float, q_len: int, kv_len: int, dtype: torch.dtype) -> tuple[Any, MaskStructure]:
    """Query, key and value with one bad number, and a causal structure in which half of the rows see its key."""
    source, sizes = torch.Generator().manual_seed(3), ((4, q_len), (2, kv_len), (2, kv_len))
    drawn = [torch.randn(2, *size, 32, generator=source) for size in sizes]
    drawn[0][1, 2:, :, 5] = torch.tensor([[1.0], [-1.0]])  # whatever sign an infinite key has, one head sees it
    position = q_len // 2 if where == "query" else kv_len - q_len // 2 - 1
    drawn[("query", "key", "value").index(where)][1, 1, position, 5] = what
    structure = MaskStructure(2, q_len, kv_len, causal=True, q_offset=kv_len - q_len)
    return [t.to(dtype) for t in drawn], structure


def bad_rows(where: str, call: AttentionCall) -> Tensor:
    """`[batch, q_len, heads]`: rows that must not come out finite; of bad values those that see them."""
    # hidden keys weigh 0, and 0 times NaN is NaN in fused kernels
    q_len = call.query.shape[2]
    if where != "value":
        return ~torch.isfinite(attention(call).out).all(3)
    rows = torch.zeros(call.query.shape[0], q_len, call.query.shape[1], dtype=torch.bool)
    rows[1, q_len - q_len // 2 - 1 :, 2:] = True
    return rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("what", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_bad_numbers_come_out_as_in_plain_attention(backend: str, dtype: torch.dtype, where: str, what: float) -> None:
    if backend == "sdpa" and what == what and dtype is not torch.float32:
        pytest.skip("torch's own kernel decides what an infinity in half precision becomes")
    for q_len, kv_len in SIZES:
        (query, key, value), structure = poisoned(where, what, q_len, kv_len, dtype)
        asked = AttentionCall(query, key, value, structure, 0.2)
        out = select.attend(asked, backend).out
        bad = bad_rows(where, asked)
        # an infinite query hides few keys whose numbers all have one sign
        assert bad.any() or (what == what and kv_len < 16), "nothing bad was asked for"
        assert not torch.isfinite(out).all(3)[bad].any(), (q_len, kv_len)
        assert torch.isfinite(out[0]).all(), "a clean batch row came out bad"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("length", [9, 40])
def test_the_gradient_of_a_poisoned_row_is_bad_too(backend: str, where: str, length: int) -> None:
    tensors, structure = poisoned(where, float("nan"), length, length, torch.float32)
    gradients = []
    for name in (backend, "eager"):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = select.attend(AttentionCall(*leaves, structure, 0.2), name).out  # type: ignore[arg-type]
        gradients.append(torch.autograd.grad(out.sum(), leaves))
    for ours, plain in zip(*gradients, strict=True):
        assert torch.isnan(ours).any() == torch.isnan(plain).any()
        assert torch.isfinite(ours)[0].all()


@pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")
@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("compute", ["model", "bf16", "int8"])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("what", [float("nan"), float("inf")], ids=str)
def test_every_instruction_set_and_product_lets_them_out(level: str, compute: str, where: str, what: float) -> None:
    if compute == "int8" and level not in ("avx512_bf16", "amx"):
        pytest.skip("int8 products need avx512_bf16 or amx")
    for q_len, kv_len in SIZES:
        (query, key, value), structure = poisoned(where, what, q_len, kv_len, torch.float32)
        rules = Rules(causal=True, offset=kv_len - q_len, compute=compute)
        out, lse = launch.forward(query, key, value, 0.2, rules, need_lse=True, level=LEVELS.index(level))
        assert lse is not None
        rows = bad_rows(where, AttentionCall(query, key, value, structure, 0.2))
        assert rows.any() or (what == what and kv_len < 16)
        assert not torch.isfinite(out).all(3)[rows].any(), (q_len, kv_len)
        assert torch.isfinite(out[0]).all()
        if where != "value":
            assert not torch.isfinite(lse.transpose(1, 2)[rows]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_all_weight_keeps_no_bad_value_in(backend: str) -> None:
    """The key's weight rounds to 0, and 0 times NaN is NaN, as in stock attention."""
    query, key = torch.full((1, 2, 1, 64), -400.0), torch.ones(1, 1, 1, 64)
    value = torch.tensor([[[[1.0, float("nan"), 3.0]]]])
    asked = AttentionCall(query, key, value, MaskStructure(1, 1, 1), 0.125, sink_logits=torch.zeros(2))
    assert select.attend(asked, backend).out.isnan()[..., 1].all()
