"""No rows, no queries or no keys: every backend answers with zeros of torch's shape, before kernels divide by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.select import BACKENDS

from ..support.requests import HALF
from .test_triton import interpreted

EVERY = [pytest.param(name, marks=interpreted) if name == "triton" else name for name in BACKENDS]


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 1, 0), (0, 1, 7), (0, 0, 0)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_every_backend_answers_as_torch(
    backend: str, batch: int, q_len: int, kv_len: int, causal: bool
) -> None:
    if (found := BACKENDS[backend].missing()) and backend == "native":
        pytest.skip("; ".join(found))
    tensors = [
        torch.zeros(batch, heads, length, 16, dtype=HALF[0], requires_grad=True)
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    ]
    structure = CallStructure(batch, q_len, kv_len, causal=causal, q_offset=kv_len - q_len)
    asked = AttentionRequest(*tensors, structure, 0.25, need_lse=True)
    right = F.scaled_dot_product_attention(*tensors, enable_gqa=True).transpose(1, 2)
    for request in (asked, replace(asked, sink_logits=torch.zeros(4))):
        result = BACKENDS[backend].attend(request)
        assert torch.equal(result.out, right)
        assert result.lse is not None
        assert result.lse.shape == (batch, 4, q_len)
        for gradient in torch.autograd.grad(result.out.sum(), tensors):
            assert not gradient.any()
    with torch.no_grad():
        assert torch.equal(BACKENDS[backend].attend(replace(asked, need_lse=False)).out, right)
