"""Capped scores in a traced graph on a device: products in bfloat16, whose error is that of stock eager attention."""

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.sdpa import masked

from ..support.on_device import OnCuda

CAP, SCALING = 5.0, 0.25


def stock(call: AttentionCall) -> torch.Tensor:
    """As Transformers' eager attention writes Gemma 2's scores, in the dtype of the model."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (call.key, call.value))
    scores = torch.tanh(call.query @ key.transpose(2, 3) * SCALING / CAP) * CAP
    scores = scores + torch.full(scores.shape[2:], float("-inf")).triu(1).to(scores.dtype)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def test_err_no_more_than_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, 90, 32, generator=g).bfloat16() for h in (4, 2, 2))
    structure = MaskStructure(2, 90, 90, causal=True)
    call = AttentionCall(query, key, value, structure, SCALING, softcap=CAP)
    products: list[torch.dtype] = []
    matmul = torch.matmul

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append(a.dtype)
        return matmul(a, b)

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "matmul", noted)
    truth = reference.attention(call).out.transpose(1, 2)
    products.clear()
    errors = {}
    for where, there in (("device", query.as_subclass(OnCuda)), ("processor", query)):
        out = masked.masked_call(call, there, key, value, structure.visible())
        errors[where] = (out.double() - truth).abs().max()
    assert products == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    assert errors["processor"] <= errors["device"] <= 2 * (stock(call).double() - truth).abs().max()
