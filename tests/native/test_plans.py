"""Plans that the native kernels carry out: true to the definition, to causality and to the neighbours."""

from dataclasses import replace

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.slicing import some_heads
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.native.library import level_names, missing
from adaattn_hf.plans import execute
from adaattn_hf.plans.plan import EXACT, Choice, LayerPlan
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.tensors import LayerTensors

from ..support.choices import make_choice
from ..support.statistics import sqnr

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")
NO_INT8 = pytest.mark.skipif("avx512_bf16" not in level_names(), reason="no int8 products on this machine")
N, D, HEADS = 300, 32, 3
LEFT = torch.ones(2, N, dtype=torch.bool)
LEFT[1, :77] = False
DOCUMENTS = torch.arange(N)[None].expand(2, -1) // 140
STRUCTURES = {
    "causal": CallStructure(2, N, N, causal=True),
    "left padding": CallStructure(2, N, N, causal=True, key_padding=LEFT),
    "documents": CallStructure(2, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "bidirectional": CallStructure(2, N, N, key_padding=LEFT),
    "chunk of a prefill": CallStructure(2, 60, N, causal=True, q_offset=N - 60),
    "step": CallStructure(2, 1, N, causal=True, q_offset=N - 1),
    "step in a static cache": CallStructure(2, 1, N, causal=True, q_offset=torch.tensor(200)),
}
INT8 = make_choice(precision="int8")


def case(structure: CallStructure, seed: int = 0, **extra: object) -> AttentionRequest:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 2 * HEADS, structure.q_len, D, generator=generator) * 2
    key = torch.randn(2, HEADS, N, D, generator=generator) + 0.5
    value = torch.randn(2, HEADS, N, D, generator=generator)
    return AttentionRequest(query, key, value, structure, D**-0.5, **extra)  # type: ignore[arg-type]


def program(*choices: Choice) -> Program:
    mean = torch.full((HEADS, D), 0.5) + 0.1 * torch.arange(HEADS)[:, None]
    return Program(LayerPlan(0, "", choices), LayerTensors(mean), 10**6)


def defined_output(made: Program, request: AttentionRequest) -> torch.Tensor:
    parts = [
        reference.attention(choice.defined(some_heads(request, [head]), [head], made.tensors)).out
        for head, choice in enumerate(made.plan.choices)
    ]
    return torch.cat(parts, 2)


@NO_INT8
@pytest.mark.parametrize("name", list(STRUCTURES)[:5])
@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"sink_logits": torch.linspace(-1, 2, 2 * HEADS)}])
@pytest.mark.parametrize("kind", ["exact", "window"])
def test_int8_is_as_accurate_as_the_torch_path(name: str, extra: dict[str, object], kind: str) -> None:
    request = case(STRUCTURES[name], **extra)
    choice = {"exact": INT8, "window": make_choice("window", 48, 4, precision="int8")}[kind]
    made = program(choice, choice, choice)
    assert set(execute.launch_names([choice], request).values()) != {choice.label}
    native = execute.attend(made, request, "native").out
    torch_path = execute.attend(made, request, "sdpa").out
    wide = Choice(choice.keys)
    unrounded = defined_output(program(wide, wide, wide), request)
    assert sqnr(defined_output(made, request), native) > 38
    assert sqnr(unrounded, native) > sqnr(unrounded, torch_path) - 3


@NO_INT8
def test_the_future_and_the_neighbours_change_nothing() -> None:
    made, request = program(INT8, INT8, EXACT), case(STRUCTURES["causal"])
    before = execute.attend(made, request, "native").out
    for tensor in (request.query, request.key, request.value):
        tensor[0, :, 130:] = tensor[0, :, 130:] * -30 + 1
    after = execute.attend(made, request, "native").out
    assert torch.equal(before[0, :130], after[0, :130])
    assert torch.equal(before[1], after[1])
    assert not torch.allclose(before[0, 130:], after[0, 130:], atol=1e-2)


@NO_INT8
def test_half_precision_models_get_int8_products() -> None:
    request = case(STRUCTURES["causal"])
    low = replace(request, **{name: getattr(request, name).bfloat16() for name in ("query", "key", "value")})
    made = program(INT8, INT8, INT8)
    found = execute.attend(made, low, "native").out
    assert found.dtype == torch.bfloat16
    wide = replace(low, **{name: getattr(low, name).float() for name in ("query", "key", "value")})
    assert sqnr(defined_output(made, wide), found) > 36
