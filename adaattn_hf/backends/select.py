"""Which backend serves a call, and the one memory of what was decided: by kind of call, never by trying.

`auto` takes the first backend of the device's order that refuses nothing. A backend that the user names is taken or
raises with its refusals.
"""

from contextlib import suppress

import torch

from ..attention.call import AttentionCall, AttentionResult
from ..attention.kind import BIAS, COMPILING, DROPOUT, EMPTY, SINKS, SOFTCAP, SYMBOLIC, CallKind
from ..errors import is_news, logger, unknown
from .base import Backend, Kernel, installed, zero_output
from .eager import EagerBackend
from .flash import FA2, FA3, FA3_FWD, Flash4Backend
from .native.backend import NativeBackend
from .order import TRITON
from .order import order as order
from .sdpa import SdpaBackend

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (Flash4Backend(), FA3, FA3_FWD, FA2, TRITON, NativeBackend(), SdpaBackend(), EagerBackend())
}

MAX_KINDS = 1024
"""Kinds of calls that are remembered; the oldest ones are forgotten."""

Kernels = dict[tuple[CallKind, "str | None"], "Kernel | None"]
"""Kernels by the kind of call and the backend that was named; None where all that may be asked refuse it."""

plain_kernels: Kernels = {}
"""The kernels of calls without rules per head; those of other calls are kept with their `HeadRules`."""

_LOOK_CLOSER = COMPILING | SYMBOLIC | DROPOUT | SOFTCAP | SINKS | BIAS
"""Calls of which nothing is remembered, and those whose numbers and further tensors are checked each time."""


class BackendRefusal(RuntimeError):
    """A backend that was asked for by name cannot serve the call."""


def by_name(name: str) -> Backend:
    """The backend of that name; a ValueError for another lists the known ones and the nearest."""
    if name not in BACKENDS:
        raise ValueError(unknown("backend", name, BACKENDS))
    return BACKENDS[name]


def refusals_of(name: str, kind: CallKind) -> tuple[str, ...]:
    """All the reasons why a backend cannot serve a call: what is missing here, then what the call asks for."""
    return (*missing(name), *by_name(name).refusals(kind))


def may_run_here(name: str) -> bool:
    """Whether a backend may serve here, as far as that is known without asking for devices, importing or opening."""
    backend = BACKENDS[name]
    built = backend.supports.device != "cuda" or torch.backends.cuda.is_built()
    return built and (not backend.package or installed(backend.package))


def check_may_run_here(name: str) -> None:
    """Refuses a backend that can serve no call of this process; the BackendRefusal says all that it lacks."""
    lacking = list(by_name(name).missing())
    if BACKENDS[name].supports.device == "cuda" and not torch.cuda.is_available():
        lacking.append("it runs on CUDA devices, of which torch sees none here")
    if lacking:
        raise BackendRefusal(
            f"backend {name!r} cannot serve any call here: {'; '.join(lacking)}. "
            'Use attn_implementation="adaattn" to let a backend be chosen.'
        )


@torch.compiler.assume_constant_result
def missing(name: str) -> tuple[str, ...]:
    """All that this installation lacks for a backend; a traced graph takes the answer as it is."""
    return by_name(name).missing()


def attend(call: AttentionCall, backend: str | None = None) -> AttentionResult:
    """Attention by the chosen backend, or by a named one.

    A ValueError where tensors do not belong together or a number is out of its range. A BackendRefusal where the named
    backend cannot serve the call, or none serves its rules per head.
    """
    kernel = kernel_of(call, backend)
    if kernel is None:
        raise refused(call.checked_kind(backend is not None), backend)
    return kernel(call)


def kernel_of(call: AttentionCall, backend: str | None = None, compiling: bool | None = None) -> Kernel | None:
    """The kernel of a call, made once per kind; None where all backends that may be asked refuse the kind.

    A ValueError as of `attend`. In traced graphs, which guard whatever they read, nothing is remembered; `compiling`
    says whether one is traced, for those who know.
    """
    kind = call.kind(backend is not None, compiling)
    if kind is None or kind.features & _LOOK_CLOSER:
        return _looked_up(call, backend)
    rules = call.per_head
    kernel = (plain_kernels if rules is None else rules.kernels).get((kind, backend))
    return _looked_up(call, backend) if kernel is None else kernel


def _looked_up(call: AttentionCall, backend: str | None) -> Kernel | None:
    kind, rules = call.checked_kind(backend is not None), call.per_head
    kernels: Kernels = plain_kernels if rules is None else rules.kernels
    key, traced = (kind, backend), kind.features & (COMPILING | SYMBOLIC)
    if not traced:
        with suppress(KeyError):  # in one look: between two of them another thread may take the kernel out
            return kernels[key]
    serves, passed = find(kind, backend)
    kernel = None
    if serves is not None:
        name, device, dtype = serves.name, kind.device.type, kind.dtype
        if not kind.compiling and is_news(device, dtype, name):
            why = f" (passed over: {' | '.join(passed)})" if passed else ""
            logger.info("adaattn: %s serves %s %s%s", name, device, str(dtype).removeprefix("torch."), why)
        kernel = zero_output if kind.features & EMPTY else serves.kernel(kind, rules)
    return kernel if traced else store_kernel(kernels, key, kernel)


def store_kernel(kernels: Kernels, key: tuple[CallKind, str | None], kernel: Kernel | None) -> Kernel | None:
    """Keeps the kernel of a kind, and returns it; the oldest ones go."""
    if len(kernels) >= MAX_KINDS:
        for oldest in list(kernels)[: 1 - MAX_KINDS]:  # a list is made in one step, whatever other threads do meanwhile
            kernels.pop(oldest, None)
    kernels[key] = kernel
    return kernel


def choose(kind: CallKind, backend: str | None = None) -> Backend:
    """The backend for calls of this kind. BackendRefusal where the named one cannot serve it."""
    serves, _ = find(kind, backend)
    if serves is None:
        raise refused(kind, backend)
    return serves


def refused(kind: CallKind, backend: str | None) -> BackendRefusal:
    """The error of a kind that no backend serves that may be asked."""
    _, passed = find(kind, backend)
    name = "no backend can" if backend is None else f"backend {backend!r} cannot"
    return BackendRefusal(
        f"{name} serve this call ({kind.words()}): {' | '.join(passed)}. "
        'Use attn_implementation="adaattn" to let a backend be chosen.'
    )


def find(kind: CallKind, backend: str | None = None) -> tuple[Backend | None, list[str]]:
    """The backend that serves calls of this kind, None where all that may be asked refuse them; and these refusals."""
    passed: list[str] = []
    for name in (backend,) if backend is not None else order(kind):
        reasons = refusals_of(name, kind)
        if not reasons:
            return BACKENDS[name], passed
        passed.append(f"{name}: {'; '.join(reasons)}")
    return None, passed
