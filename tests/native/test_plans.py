"""Plans in int8 that the native kernels carry out: true to the definition."""

from dataclasses import replace

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native.library import missing
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.plan import Choice, LayerPlan
from adaattn_hf.plans.tensors import LayerTensors

from ..support.choices import make_choice
from ..support.plans import defined
from ..support.statistics import sqnr
from .test_kernels import NO_INT8

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")
N, D, HEADS = 300, 32, 3
LEFT = torch.ones(2, N, dtype=torch.bool)
LEFT[1, :77] = False
DOCUMENTS = torch.arange(N)[None].expand(2, -1) // 140
STRUCTURES = {
    "causal": MaskStructure(2, N, N, causal=True),
    "left padding": MaskStructure(2, N, N, causal=True, key_padding=LEFT),
    "documents": MaskStructure(2, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "bidirectional": MaskStructure(2, N, N, key_padding=LEFT),
    "chunk of a prefill": MaskStructure(2, 60, N, causal=True, q_offset=N - 60),
    "step": MaskStructure(2, 1, N, causal=True, q_offset=N - 1),
    "step in a static cache": MaskStructure(2, 1, N, causal=True, q_offset=torch.tensor(200)),
}
INT8 = make_choice(precision="int8")


def case(structure: MaskStructure, seed: int = 0, **extra: object) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 2 * HEADS, structure.q_len, D, generator=generator) * 2
    key = torch.randn(2, HEADS, N, D, generator=generator) + 0.5
    value = torch.randn(2, HEADS, N, D, generator=generator)
    return AttentionCall(query, key, value, structure, D**-0.5, **extra)  # type: ignore[arg-type]


def bound_layer(*choices: Choice) -> BoundLayer:
    mean = torch.full((HEADS, D), 0.5) + 0.1 * torch.arange(HEADS)[:, None]
    return BoundLayer(LayerPlan(0, "", choices), LayerTensors(mean), 10**6)


@NO_INT8
@pytest.mark.parametrize("name", list(STRUCTURES)[:5])
@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"sink_logits": torch.linspace(-1, 2, 2 * HEADS)}])
@pytest.mark.parametrize("kind", ["exact", "window"])
def test_int8_is_as_accurate_as_the_torch_path(name: str, extra: dict[str, object], kind: str) -> None:
    call = case(STRUCTURES[name], **extra)
    choice = {"exact": INT8, "window": make_choice("window", 48, 4, precision="int8")}[kind]
    made = bound_layer(choice, choice, choice)
    assert set(execute.launch_names([choice], call).values()) != {choice.label}
    native = execute.attend(made, call, "native").out
    torch_path = execute.attend(made, call, "sdpa").out
    wide = Choice(choice.keys)
    unrounded = defined(bound_layer(wide, wide, wide), call)
    assert sqnr(defined(made, call), native) > 38
    assert sqnr(unrounded, native) > sqnr(unrounded, torch_path) - 3


@NO_INT8
def test_half_precision_models_get_int8_products() -> None:
    call = case(STRUCTURES["causal"])
    low = replace(call, **{name: getattr(call, name).bfloat16() for name in ("query", "key", "value")})
    made = bound_layer(INT8, INT8, INT8)
    found = execute.attend(made, low, "native").out
    assert found.dtype == torch.bfloat16
    wide = replace(low, **{name: getattr(low, name).float() for name in ("query", "key", "value")})
    assert sqnr(defined(made, wide), found) > 36
