"""The attention functions that a model can be given by name: the package's, by backend, and the Hub's kernel."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from adaattn_hf.patches.call.interface import attention_function
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from .kernels import kernel

HUB = "hub"
"""Stands among names of backends for the kernel of `hub/adaattn`."""


def door(name: str | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of a backend, of the choice among them (None), or of the Hub's kernel."""
    return by_hub if name == HUB else attention_function(name)


def by_hub(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **given: Any) -> Any:
    """The kernel's function, which is handed masks as Transformers makes them for it: dense."""
    if isinstance(mask, StructuredMask):
        rules = mask.structure
        mask = rules.visible().expand(rules.batch, -1, -1, -1)
    return kernel("adaattn").flash_attn_forward(module, query, key, value, mask, **given)
