"""Makes hooks run where a library calls `model.forward(...)` instead of `model(...)`.

torch runs hooks for the latter only. sentence-transformers does the former, so a model inside it gets a `forward`
that goes through the hooks, set on that instance and not on its class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from .hooks import Unpadding, frames_closed

_CALLERS = ("sentence_transformers.",)


class DirectForward:
    """Replaces the `forward` of one model: calls the model, hooks included; inside of that call, its own forward."""

    def __init__(self, module: nn.Module, unpadding: Unpadding) -> None:
        """Replaces `module.forward` at once; `remove` undoes it."""
        self.module, self.unpadding = module, unpadding
        self.inner = module.forward
        functools.update_wrapper(self, self.inner)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the arguments and returns the result of the model's forward."""
        if self.unpadding.runs(self.module):
            return self.inner(*args, **kwargs)
        with frames_closed():
            return self.module(*args, **kwargs)

    def remove(self) -> None:
        """Gives the model back the `forward` that it had before."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if getattr(self.inner, "__func__", None) is not type(self.module).forward:
                self.module.__dict__["forward"] = self.inner


def called_directly(holder: nn.Module) -> Iterator[nn.Module]:
    """Modules inside `holder` whose parent calls their `forward` directly."""
    for module in holder.modules():
        if type(module).__module__.startswith(_CALLERS):
            yield from module.children()
