"""The built kernel on the device at hand: `LOCAL_KERNELS=adaattn/flash-adaattn=. pytest tests`."""

from __future__ import annotations

import itertools

import kernels
import pytest
import torch
import torch.nn.functional as F

flash = kernels.get_kernel("adaattn/flash-adaattn", version=1, trust_remote_code=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16] + ([torch.float32] if DEVICE == "cpu" else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_attended_each_by_itself(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(0)
    sums = [0, 7, 8, 40, 73]
    cu = torch.tensor(sums, dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(73, heads, 64, dtype=dtype, device=DEVICE) for heads in (4, 2, 2))
    out = flash.flash_attn_varlen_func(q, k, v, cu, cu, 33, 33, causal=causal)
    for a, b in itertools.pairwise(sums):
        alone = (t[a:b].float().transpose(0, 1)[None] for t in (q, k, v))
        right = F.scaled_dot_product_attention(*alone, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(out[a:b].float(), right, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=0)
