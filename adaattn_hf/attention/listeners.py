"""Who listens to attention calls: a listener notes a call, answers it in the model's place, or looks at the output.

The listeners of a thread hear every attention call of its models. Calibration and monitoring answer calls; `explain`,
`record`, spans and counts note them. Nothing of a model is patched, and nothing is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from .call import AttentionCall


class Listener:
    """Hears the attention calls of a thread; a subclass overrides what interests it.

    A call's `layer` and `backend` say which layer makes it, and which backend was asked for by name.
    """

    whole = ""
    """Who needs all heads and keys of a call at once, which streaming caches do not keep; empty if nobody does."""

    def before(self, module: nn.Module, call: AttentionCall) -> None:
        """Note a call that is about to be computed."""

    def answer(self, module: nn.Module, call: AttentionCall) -> Tensor | None:
        """Return the output `[batch, q_len, heads, head_dim_v]` in the model's place, or None to leave that to it."""
        return None

    def after(self, module: nn.Module, call: AttentionCall, out: Tensor) -> None:
        """Look at the output of a call, `[batch, q_len, heads, head_dim_v]`."""


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("adaattn_listeners", default=())
listeners = _listeners.get
"""The listeners of this thread, those of inner blocks last. Small calls ask once whether there is anybody."""

L = TypeVar("L", bound=Listener)


@contextmanager
def listening(listener: L) -> Iterator[L]:
    """Lets a listener hear the calls of this thread; others may come and go meanwhile, in any order."""
    _listeners.set((*listeners(), listener))
    try:
        yield listener
    finally:
        _listeners.set(tuple(other for other in listeners() if other is not listener))


def ask(heard_by: Sequence[Listener], module: nn.Module, call: AttentionCall) -> Tensor | None:
    """Tells listeners of a call; returns the innermost answer, None if the model is to compute it."""
    for listener in heard_by:
        listener.before(module, call)
    answers = (listener.answer(module, call) for listener in reversed(heard_by))
    return next((out for out in answers if out is not None), None)


def show(heard_by: Sequence[Listener], module: nn.Module, call: AttentionCall, out: Tensor) -> None:
    """Shows listeners the output of a call, the innermost one first."""
    for listener in reversed(heard_by):
        listener.after(module, call, out)


Tap = Callable[[nn.Module, AttentionCall], Tensor]
"""Maps a module and its call to the output `[batch, q_len, heads, head_dim_v]`."""


@dataclass(eq=False)
class Answers(Listener):
    """Answers every call by a function, which is given keys and values as numbers."""

    whole = "calibration or a profile"
    function: Tap

    def answer(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Return what the function computes."""
        return self.function(module, call.dequantised())


def tapping(tap: Tap) -> AbstractContextManager[Answers]:
    """Lets a function answer the calls of this thread."""
    return listening(Answers(tap))
