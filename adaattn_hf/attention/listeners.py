"""Who listens to attention calls: a listener notes a call, answers it in the model's place, or looks at the output.

The listeners of a thread hear every attention call of its models. Calibration and monitoring answer calls; `explain`,
`record`, spans and counts note them. Nothing of a model is patched, and nothing is left over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from .call import AttentionCall

Tap = Callable[[nn.Module, AttentionCall], Tensor]
"""Maps a module and its call to the output `[batch, q_len, heads, head_dim_v]`."""


@dataclass(eq=False)
class Listener:
    """Hears the attention calls of a thread, by up to three functions of the module and the call.

    A call's `layer` and `backend` say which layer makes it, and which backend was asked for by name.

    Attributes:
        before: Notes a call that is about to be computed.
        answer: Returns the output `[batch, q_len, heads, head_dim_v]` in the model's place; None leaves that to it.
        after: Looks at the output, which is its third argument.
        whole: Who needs all heads and keys of a call at once, which streaming caches do not keep; empty if nobody does.
    """

    before: Callable[[nn.Module, AttentionCall], object] | None = None
    answer: Callable[[nn.Module, AttentionCall], Tensor | None] | None = None
    after: Callable[[nn.Module, AttentionCall, Tensor], object] | None = None
    whole: str = ""


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


def tapping(tap: Tap) -> AbstractContextManager[Listener]:
    """Lets a function answer the calls of this thread; it is given keys and values as numbers."""
    whole = "calibration or a profile"
    return listening(Listener(answer=lambda module, call: tap(module, call.dequantised()), whole=whole))


def ask(heard_by: Sequence[Listener], module: nn.Module, call: AttentionCall) -> Tensor | None:
    """Tells listeners of a call; returns the innermost answer, None if the model is to compute it."""
    for listener in heard_by:
        if listener.before is not None:
            listener.before(module, call)
    for listener in reversed(heard_by):
        if listener.answer is not None and (out := listener.answer(module, call)) is not None:
            return out
    return None


def show(heard_by: Sequence[Listener], module: nn.Module, call: AttentionCall, out: Tensor) -> None:
    """Shows listeners the output of a call, the innermost one first."""
    for listener in reversed(heard_by):
        if listener.after is not None:
            listener.after(module, call, out)
