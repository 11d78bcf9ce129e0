"""The backward, the operators and tracing, against autograd in double precision."""

from dataclasses import replace

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native.backend import NativeBackend
from adaattn_hf.backends.native.library import missing
from adaattn_hf.backends.native.ops import attend_op, backward_op

from ..support.calls import attended
from .test_backend import STRUCTURES, call

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")


def gradients(asked: AttentionCall, dtype: torch.dtype, native: bool) -> list[torch.Tensor]:
    names = [name for name in ("query", "key", "value", "bias", "sink_logits") if getattr(asked, name) is not None]
    leaves = {name: getattr(asked, name).detach().to(dtype).requires_grad_() for name in names}
    changed = replace(asked, **leaves)
    out = attended(NativeBackend(), changed).out if native else reference.attention(changed).out
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return list(torch.autograd.grad((out.double() * weight).sum(), list(leaves.values())))


SINKS = {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}
EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": SINKS,
    "bias": {"bias": torch.randn(1, 4, 1, 100, generator=torch.Generator().manual_seed(1))},
    "one bias": {"bias": torch.randn(1, 4, 1, 1, generator=torch.Generator().manual_seed(1))},
    "all": SINKS | {"softcap": 3.0, "bias": torch.randn(2, 1, 1, 100, generator=torch.Generator().manual_seed(1))},
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("extra", EXTRAS)
def test_output_and_gradients_match_double_precision(name: str, extra: str) -> None:
    asked = call(STRUCTURES[name], **EXTRAS[extra])
    result, right = attended(NativeBackend(), asked), reference.attention(asked)
    torch.testing.assert_close(result.out.double(), right.out, atol=2e-6, rtol=0)
    assert result.lse is not None
    torch.testing.assert_close(result.lse.double(), right.lse, atol=5e-6, rtol=1e-6)
    ours = gradients(asked, torch.float32, native=True)
    truth = gradients(asked, torch.float64, native=False)
    for got, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_as_good_as_torch(dtype: torch.dtype) -> None:
    asked = call(MaskStructure(2, 300, 300, causal=True), dtype)
    truth = gradients(asked, torch.float64, native=False)
    ours = gradients(asked, dtype, native=True)
    for got, other, expected in zip(ours, _sdpa(asked, dtype), truth, strict=True):
        band = torch.finfo(dtype).eps * expected.abs().max().item()
        theirs = (other.double() - expected).abs().max().item()
        assert (got.double() - expected).abs().max().item() <= 2 * theirs + band


def _sdpa(asked: AttentionCall, dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in (asked.query, asked.key, asked.value)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=True, scale=asked.scaling, enable_gqa=True
    ).transpose(1, 2)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return list(torch.autograd.grad((out.double() * weight).sum(), leaves))


@pytest.mark.parametrize("name", ["causal", "left padding", "mask"])
def test_opcheck(name: str) -> None:
    asked = call(STRUCTURES[name], **EXTRAS["all"])
    leaves = {n: getattr(asked, n).clone().requires_grad_() for n in ("query", "key", "value", "bias", "sink_logits")}
    torch.library.opcheck(attend_op, replace(asked, **leaves).operands())
    out, lse = attend_op(*asked.operands())
    grad = torch.randn_like(out)
    torch.library.opcheck(backward_op, (True, grad, out, lse, *asked.operands()))


@pytest.mark.parametrize("name", ["causal", "suffix", "left padding", "packed", "device offset"])
def test_compiles_into_one_graph(name: str) -> None:
    asked = call(STRUCTURES[name])
    backend = NativeBackend()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attended(backend, replace(asked, query=query, key=key, value=value)).out * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    leaves = [t.detach().clone().requires_grad_() for t in (asked.query, asked.key, asked.value)]
    ours = compiled(*leaves)
    torch.testing.assert_close(ours, attend(asked.query, asked.key, asked.value), atol=0, rtol=0)
    plain = [t.detach().clone().requires_grad_() for t in (asked.query, asked.key, asked.value)]
    for got, expected in zip(
        torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(attend(*plain).sum(), plain), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_backward_does_not_depend_on_threads() -> None:
    asked = call(MaskStructure(2, 500, 500, causal=True))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gradients(asked, torch.float32, native=True)
        torch.set_num_threads(2)
        two = gradients(asked, torch.float32, native=True)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
