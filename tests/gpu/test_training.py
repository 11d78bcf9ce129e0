"""Training on a CUDA device: a step under autocast beside stock's, and dropout in attention against its definition."""

from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import choose

from ..support.calls import attended
from .test_cuda import make, pair

pytestmark = pytest.mark.gpu


def update(model: Any, dtype: torch.dtype) -> torch.Tensor:
    """What one step of descent changes, in one vector: a left-padded batch under autocast to `dtype`."""
    ids = torch.randint(3, 64, (3, 50), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=dtype is torch.float16)
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert dtype is not torch.float16 or scaler.get_scale() == 256.0, "the step was skipped"
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]) - before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_step_under_autocast_errs_no_more_than_stock(name: str, dtype: torch.dtype) -> None:
    """Also with a scaler of gradients, which float16 needs."""
    truth = update(pair(name)[0], torch.float32)
    stock, ours = (update(model, dtype) for model in pair(name))
    assert 0 < (ours - truth).norm() <= 2 * (stock - truth).norm() + torch.finfo(dtype).eps * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "left padding"])
def test_dropout_zeroes_weights_and_scales_the_rest(kind: str, dtype: torch.dtype) -> None:
    """Values that are the identity show each weight; gradients are those of the weights that stayed."""
    n, rate = 64, 0.25
    real = torch.ones(3, n, dtype=torch.bool, device="cuda")
    real[0, :20] = False
    padding = real if kind == "left padding" else None
    structure = MaskStructure(3, n, n, causal=kind != "full", key_padding=padding)
    asked = make(structure, dtype, n)
    leaves = [tensor.detach().requires_grad_() for tensor in (asked.query, asked.key, asked.value)]

    def attend(value: torch.Tensor) -> torch.Tensor:
        call = AttentionCall(*leaves[:2], value, structure, scaling=asked.scaling, dropout=rate)
        backend = choose(call.checked_kind())
        assert backend.name == "sdpa"  # torch draws what is dropped
        torch.manual_seed(3)
        return attended(backend, call).out

    identity = torch.eye(n, dtype=dtype, device="cuda").expand(3, 2, n, n).contiguous()
    shown = attend(identity.requires_grad_()).detach().double().transpose(1, 2)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = AttentionCall(*wide[:2], identity.detach().double(), structure, scaling=asked.scaling)
    weights = reference.attention(exact).out.transpose(1, 2)
    seen = weights.detach() > 1e-3
    kept = (shown > 0) & seen
    share = 1 - kept.sum() / seen.sum()
    deviation = (rate * (1 - rate) / seen.sum()) ** 0.5
    assert abs(share - rate) < 5 * deviation
    rtol = 1e-3 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(shown[kept], weights[kept] / (1 - rate), atol=0, rtol=rtol)

    direction = torch.randn(3, n, 8, n, dtype=torch.float64, device="cuda")
    ours = torch.autograd.grad((attend(leaves[2]).double() * direction).sum(), leaves)
    dropped = weights * (shown > 0) / (1 - rate)
    out = (dropped @ wide[2].repeat_interleave(4, dim=1)).transpose(1, 2)
    for a, b in zip(ours, torch.autograd.grad((out * direction).sum(), wide), strict=True):
        assert (a - b).norm() <= rtol * b.norm()
