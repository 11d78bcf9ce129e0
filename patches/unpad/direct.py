"""Hooks for those who call `model.forward(...)` instead of `model(...)`.

torch runs hooks for the latter alone. sentence-transformers calls the former, so a model that it holds gets a
`forward` of its own, on the one object and not on its class, that goes through the hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from .hooks import Unpadding

__all__ = ["DirectForward", "called_directly"]

_CALLERS = ("sentence_transformers.",)


class DirectForward:
    """A model's `forward`: from outside it is a call of the model, from inside that call it is the forward itself."""

    def __init__(self, module: nn.Module, unpadding: Unpadding) -> None:
        """Put in place at once; `remove` takes it away."""
        self.module, self.unpadding = module, unpadding
        self.inner = module.forward
        functools.update_wrapper(self, self.inner)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the model's forward."""
        return (self.inner if self.unpadding.runs(self.module) else self.module)(*args, **kwargs)

    def remove(self) -> None:
        """The model has the `forward` of its class again, or the one that it had before."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if getattr(self.inner, "__func__", None) is not type(self.module).forward:
                self.module.__dict__["forward"] = self.inner


def called_directly(holder: nn.Module) -> Iterator[nn.Module]:
    """Modules whose owner inside `holder` is known to call their `forward`."""
    for module in holder.modules():
        if type(module).__module__.startswith(_CALLERS):
            yield from module.children()
