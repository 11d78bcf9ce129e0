"""No rows, heads, queries or keys: every backend answers with zeros of torch's shape, before kernels divide by them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.patches.call.interface import attention_function
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from ..support.calls import HALF, attended
from ..support.malformed import Layer
from .test_triton import interpreted

EVERY = [pytest.param(name, marks=interpreted) if name == "triton" else name for name in BACKENDS]


@pytest.mark.parametrize("backend", ["sdpa", "eager", "native", None])
@pytest.mark.parametrize(("batch", "heads", "q_len", "kv_len", "size_v"), [
    (0, 4, 5, 5, 16), (0, 4, 1, 7, 16), (2, 4, 0, 7, 16), (2, 4, 0, 0, 16), (2, 4, 5, 5, 0), (2, 0, 5, 5, 16),
    (2, 0, 1, 7, 16), (2, 4, 5, 0, 16),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_attention_function_answers_each_layer(
    backend: str | None, batch: int, heads: int, q_len: int, kv_len: int, size_v: int, chunk: int | None
) -> None:
    if backend == "native" and (found := BACKENDS[backend].missing()):
        pytest.skip("; ".join(found))
    query, key, value = (
        torch.zeros(batch, n, length, size)
        for n, length, size in ((heads, q_len, 16), (2, kv_len, 16), (2, kv_len, size_v))
    )
    serve = attention_function(backend)
    rules = MaskStructure(batch, q_len, kv_len, causal=True, q_offset=kv_len - q_len, chunk=chunk)
    mask = None if chunk is None else StructuredMask(rules, torch.device("cpu"))
    with torch.no_grad():
        for _ in range(2):  # the second call takes the way that the first one kept
            out = serve(Layer(1), query, key, value, mask, scaling=0.25)[0]
            assert out.shape == (batch, q_len, heads, size_v)
        weights = serve(Layer(1), query, key, value, mask, output_attentions=True)[1]
        assert weights is not None
        assert weights.shape == (batch, heads, q_len, kv_len)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "native", None])
@pytest.mark.parametrize("keywords", [{}, {"softcap": 2.0}, {"output_attentions": True}])
def test_keys_without_a_channel_weigh_alike_and_heads_without_keys_are_refused(
    backend: str | None, keywords: dict[str, Any]
) -> None:
    if backend == "native" and (found := BACKENDS[backend].missing()):
        pytest.skip("; ".join(found))
    serve = attention_function(backend)
    narrow, wide = torch.zeros(2, 4, 5, 0, requires_grad=True), torch.randn(2, 4, 5, 16)
    for q_len in (5, 5, 1):
        query = narrow[:, :, :q_len]
        out, weights = serve(Layer(1), query, narrow, wide, None, **keywords)
        right = F.scaled_dot_product_attention(query, narrow, wide, is_causal=q_len > 1)
        torch.testing.assert_close(out, right.transpose(1, 2))
        assert weights is None or float(weights.detach().sum(3).sub(1).abs().max()) < 1e-6
    with pytest.raises(ValueError, match=r"^key: got 0 heads for 4 query heads, expected a divisor of 4"):
        serve(Layer(1), wide, wide[:, :0], wide[:, :0], None, **keywords)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 1, 0), (0, 1, 7), (0, 0, 0)]
)
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"window": 2, "sinks": 1, "causal": True}, {"padding": True}])
def test_every_backend_answers_as_torch(
    backend: str, batch: int, q_len: int, kv_len: int, rules: dict[str, Any]
) -> None:
    if (found := BACKENDS[backend].missing()) and backend == "native":
        pytest.skip("; ".join(found))
    tensors = [
        torch.zeros(batch, heads, length, 16, dtype=HALF[0], requires_grad=True)
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    ]
    asked_for = {"key_padding": torch.ones(batch, kv_len, dtype=torch.bool)} if "padding" in rules else rules
    structure = MaskStructure(batch, q_len, kv_len, q_offset=kv_len - q_len, **asked_for)
    asked = AttentionCall(*tensors, structure, 0.25, need_lse=True)
    right = F.scaled_dot_product_attention(*tensors, enable_gqa=True).transpose(1, 2)
    for call in (asked, replace(asked, sink_logits=torch.zeros(4))):
        result = attended(BACKENDS[backend], call)
        assert torch.equal(result.out, right)
        assert result.lse is not None
        assert result.lse.shape == (batch, 4, q_len)
        for gradient in torch.autograd.grad(result.out.sum(), tensors):
            assert not gradient.any()
    with torch.no_grad():
        assert torch.equal(attended(BACKENDS[backend], replace(asked, need_lse=False)).out, right)
