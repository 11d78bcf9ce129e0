"""Who listens to an attention call: taps that answer it, recorders that note it, and torch's own transforms.

While a tap is open, every attention call of this thread is answered by it: the attention function hands over the module
and the request, and returns what the tap returns. Calibration and monitoring listen here. A recorder notes each call's
spec for `explain`, and what `record` measures of its answer. Nothing of a model is patched and nothing is left over.
Plans that stand in for those of a model's configuration (`adaattn_hf.use_plan`) are known here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .kind import CallSpec
from .request import AttentionRequest

Tap = Callable[[nn.Module, AttentionRequest], Tensor]
"""Maps a module and its request to the output `[batch, q_len, heads, head_dim_v]`."""


@dataclass(frozen=True, eq=False)
class Seat:
    """A stand-in for the settings of a module: `raw` holds a plan or none, `slots` what was read from it."""

    raw: Mapping[str, Any]
    slots: dict[str, Any] = field(default_factory=dict)


class Seated:
    """The mark of a module; copies and pickles of it are `False`, as those of a module are run by nobody yet."""

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


SEATED = "_adaattn_seated"
"""Marks a module while some thread runs it by another plan: a graph that is traced or run then is traced again."""


@dataclass
class Recorder:
    """Collects the calls of a forward pass: the module, the spec and the backend that was asked for by name.

    With `looks`, `answered` needs all heads of a call at once, and all keys that they see. A `dry` one computes
    nothing: calls return uninitialised tensors of the right shape (for the meta device).
    """

    looks: ClassVar[bool] = False
    dry: bool = False
    calls: list[tuple[nn.Module, CallSpec, str | None]] = field(default_factory=list)

    def record(self, module: nn.Module, spec: CallSpec, forced: str | None) -> None:
        """Note one call."""
        self.calls.append((module, spec, forced))

    def answered(self, module: nn.Module, request: AttentionRequest, forced: str | None, out: Tensor) -> None:
        """Look at what a call was answered, `[batch, q_len, heads, head_dim_v]`; here nobody does."""


class Listening(NamedTuple):
    """Who listens in a thread; one record, so that a small call asks once whether there is anybody."""

    tap: Tap | None = None
    seats: Mapping[nn.Module, Seat] | None = None
    recorder: Recorder | None = None


NOBODY = Listening()
_listening: ContextVar[Listening] = ContextVar("adaattn_listening", default=NOBODY)
listening = _listening.get


@contextmanager
def _heard(name: str, listener: Any) -> Iterator[Any]:
    """Puts a listener in the place of the outer one for a while; the others may come and go meanwhile."""
    outer = getattr(listening(), name)
    _listening.set(listening()._replace(**{name: listener}))
    try:
        yield listener
    finally:
        _listening.set(listening()._replace(**{name: outer}))


def tapping(tap: Tap | None) -> AbstractContextManager[None]:
    """Lets a tap answer the calls of this thread; `None` closes an outer one for a while."""
    return _heard("tap", tap)


def seating(seats: Mapping[nn.Module, Seat]) -> AbstractContextManager[None]:
    """Lets modules run by other plans in this thread; modules that are not named keep what an outer block gave them."""
    return _heard("seats", {**(listening().seats or {}), **seats})


def recording(recorder: Recorder) -> AbstractContextManager[Recorder]:
    """Let a recorder listen to the calls of this thread."""
    return _heard("recorder", recorder)


_tracing = torch._C._get_tracing_state
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack


def transient() -> bool:
    """Whether tensors that are made now are of no use later: in a traced graph, or in a mode such as FakeTensorMode.

    Nor are tensors that were made before of use there.
    """
    return torch.compiler.is_compiling() or bool(_modes())


def tracing() -> bool:
    """Whether torch.compile or torch.jit.trace records a graph, into which nothing read from data may go."""
    return torch.compiler.is_compiling() or _tracing() is not None


def autocast_device(tensor: Tensor) -> str:
    """The device type to name where autocast is to be off; the meta device, which computes nothing, knows none."""
    return "cpu" if tensor.is_meta else tensor.device.type


def transform_at_work() -> str | None:
    """Name of the transform that is to see every operation of this thread, None where none is.

    Graphs of `torch.compile` and `torch.export` are not meant: for them the kernels are operators.
    """
    if _tracing() is not None:
        return "torch.jit.trace"
    if forward_ad._current_level >= 0:
        return "forward-mode automatic differentiation"
    if _transforms() is not None:
        return "torch.func (grad, vmap, jvp)"
    return "make_fx" if _modes() and get_proxy_mode() is not None else None
