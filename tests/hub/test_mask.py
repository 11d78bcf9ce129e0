"""The kernel `adaattn`, called directly: a mask is read once for all layers, and again where it was written to."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn


def test_a_mask_that_is_written_to_is_read_again(load_kernel: Callable[[str], ModuleType]) -> None:
    function = load_kernel("adaattn").flash_attn_forward
    query, key, value = (torch.randn(1, 2, 6, 8) for _ in range(3))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()

    def both() -> tuple[Tensor, Tensor]:
        out = function(nn.Module(), query, key, value, mask, is_causal=True)[0]
        stock = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return out, stock.transpose(1, 2)

    before = both()
    torch.testing.assert_close(*before)
    mask[..., 0] = False
    mask[..., 0, 0] = True
    after = both()
    torch.testing.assert_close(*after)
    assert not torch.allclose(before[0], after[0])
    with torch.inference_mode():
        torch.testing.assert_close(*both())
