"""Under a plan each layer has a fast call of its own, which costs little more than that of an exact layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import causal_mask_function

triton = pytest.importorskip("triton")

from adaattn_hf import load_plan  # noqa: E402  (the others import triton)
from adaattn_hf.attention import reference  # noqa: E402
from adaattn_hf.attention.call import AttentionCall  # noqa: E402
from adaattn_hf.attention.heads import HeadRules  # noqa: E402
from adaattn_hf.attention.structure import MaskStructure  # noqa: E402
from adaattn_hf.backends.select import BACKENDS  # noqa: E402
from adaattn_hf.patches.call.interface import attention_function  # noqa: E402
from adaattn_hf.patches.mask import structured_mask  # noqa: E402
from adaattn_hf.patches.mask.masks import adaattn_mask  # noqa: E402
from adaattn_hf.plans.plan import LayerPlan  # noqa: E402

from ..support.choices import make_choice  # noqa: E402
from ..support.names import registered  # noqa: E402
from ..support.plans import plan_for  # noqa: E402
from .test_triton import interpreted  # noqa: E402

LAYERS, N = 3, 40
WINDOWS = (8, 16, 12)


@pytest.fixture(autouse=True)
def served_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels refuse nothing because of where tensors lie."""
    backend = BACKENDS["triton"]
    real = backend.refusals
    monkeypatch.setattr(
        backend, "refusals", lambda kind: tuple(r for r in real(kind) if "run on CUDA" not in r), raising=False
    )
    structured_mask._structures.clear()
    with registered(impossible=True):
        yield
    structured_mask._structures.clear()


def planned(windows: tuple[int, ...] = WINDOWS) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=128, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="adaattn_triton", pad_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).half().eval()
    plan = plan_for(model, make_choice("window", 8, 2), layers=tuple(range(LAYERS)), lengths=(256,))
    layers = tuple(
        LayerPlan(layer.layer, layer.weights, (make_choice("window", window, 2),) * 2)
        for layer, window in zip(plan.layers, windows, strict=True)
    )
    load_plan(model, replace(plan, dtype="float16", layers=layers))
    return model


def modules(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def draw() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, N, heads, 32).half().transpose(1, 2) for heads in (4, 2, 2))
    return q, k, v


def mask_for(model: Any) -> Any:
    return adaattn_mask(1, N, N, mask_function=causal_mask_function, config=model.config)


def attended(model: Any, mask: Any, *tensors: Tensor) -> list[Tensor]:
    attend = attention_function("triton")
    with torch.no_grad():
        return [attend(module, *tensors, mask, scaling=0.2)[0] for module in modules(model)]


@interpreted
def test_each_layer_has_its_own_windows() -> None:
    model = planned()
    mask = mask_for(model)
    for _ in range(2):
        q, k, v = draw()
        for out, window in zip(attended(model, mask, q, k, v), WINDOWS, strict=True):
            rules = HeadRules((window,) * 2, (2, 2), ("model",) * 2)
            asked = AttentionCall(q, k, v, MaskStructure(1, N, N, causal=True), 0.2, per_head=rules)
            truth = reference.attention(asked).out
            torch.testing.assert_close(out.double(), truth, atol=4e-3, rtol=0)
