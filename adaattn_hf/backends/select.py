"""Which backend serves a call, and the one memory of what was decided: by kind of call, never by trying.

`auto` takes the first backend of the device's order that refuses nothing. A backend that the user names is taken or
raises with its refusals.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention.request import AttentionRequest, AttentionResult, CallSpec
from ..attention.tracing import jit_trace
from ..errors import unknown
from .base import Backend, Launch, facts_of, installed, nothing_seen, spec_of
from .eager import EagerBackend
from .flash import FA2, FA3, FA3_FWD, Flash4Backend, FlashBackend
from .native.backend import NativeBackend
from .order import TRITON
from .order import order as order
from .sdpa import SdpaBackend

if TYPE_CHECKING:
    from ..attention.heads import HeadRules
    from ..attention.stored import StoredKV
    from ..attention.structure import CallStructure

logger = logging.getLogger("adaattn_hf")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Flash4Backend(),
        FlashBackend(FA3),
        FlashBackend(FA3_FWD),
        FlashBackend(FA2),
        TRITON,
        NativeBackend(),
        SdpaBackend(),
        EagerBackend(),
    )
}

MOST = 1024
"""Kinds of calls that are remembered; the oldest ones are forgotten."""
launches: dict[Hashable, Any] = {}
"""What was decided, by kind of call: the only memory of decisions. Whoever calls spells kinds in the facts at hand."""


class BackendRefusal(RuntimeError):
    """A backend that was asked for by name cannot serve the call."""


def by_name(name: str) -> Backend:
    """The backend of that name; a ValueError for another lists the known ones and the nearest."""
    if name not in BACKENDS:
        raise ValueError(unknown("backend", name, BACKENDS))
    return BACKENDS[name]


def refusals_of(name: str, spec: CallSpec) -> tuple[str, ...]:
    """All the reasons why a backend cannot serve a call: what is missing here, then what the call asks for."""
    return (*_missing(name), *by_name(name).refusals(spec))


def possible(name: str) -> bool:
    """Whether a backend may serve here, as far as that is known without asking for devices, importing or opening."""
    backend = BACKENDS[name]
    built = backend.device != "cuda" or torch.backends.cuda.is_built()
    return built and (not backend.package or installed(backend.package))


def check_possible(name: str) -> None:
    """Refuses a backend that can serve no call of this process; the BackendRefusal says all that it lacks."""
    lacking = list(by_name(name).missing())
    if BACKENDS[name].device == "cuda" and not torch.cuda.is_available():
        lacking.append("it runs on CUDA devices, of which torch sees none here")
    if lacking:
        raise BackendRefusal(
            f"backend {name!r} cannot serve any call here: {'; '.join(lacking)}. "
            'Use attn_implementation="adaattn" to let a backend be chosen.'
        )


@torch.compiler.assume_constant_result
def _missing(name: str) -> tuple[str, ...]:
    return by_name(name).missing()


def traces(name: str) -> bool:
    """Whether a backend is installed, asked while a graph is traced."""
    return not _missing(name)


def remember(kind: Hashable, decided: Any) -> Any:
    """Keeps what was decided for a kind, and returns it."""
    if len(launches) >= MOST:
        for oldest in list(launches)[: 1 - MOST]:  # a list is made in one step, whatever other threads do meanwhile
            launches.pop(oldest, None)
    launches[kind] = decided
    return decided


def launch_for(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: CallStructure,
    forced: str | None = None,
    stored: StoredKV | None = None,
    rules: HeadRules | None = None,
) -> Launch | None:
    """The launch of an ordinary call, one without dropout, bias, softcap and learned sinks; decided once per kind.

    Tensors are as `Launch` takes them. None for those that ask for a closer look (subclasses, other layouts, one batch
    row for all, none at all), and where all backends that may be asked refuse rules per head. Tensors that do not
    belong together are a ValueError; BackendRefusal where `forced` cannot serve the call.
    """
    if not (
        query.dim() == key.dim() == value.dim() == 4
        and type(query) is type(key) is type(value) is Tensor
        and query.layout is key.layout is value.layout is torch.strided
    ):
        return None
    device = query.device.type
    facts = structure.facts.get((device, forced is None)) or facts_of(structure, device, forced)
    batch, heads, q_len, dim = query.shape
    _, kv_heads, kv_len, dim_v = value.shape
    # all that a decision rests on, lengths by the classes of size that thresholds ask for
    kind = (
        facts, forced, rules, stored is None, query.dtype, key.dtype, value.dtype, query.device, key.device,
        value.device, heads, kv_heads, dim, dim_v,
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        (batch * heads * q_len * kv_len).bit_length(), (key.numel() + value.numel() - 1).bit_length(),
    )  # fmt: skip
    known: Launch | None = launches.get(kind)
    if (
        known is not None
        and (batch, q_len, kv_len) == (structure.batch, structure.q_len, structure.kv_len)
        and key.shape == (batch, kv_heads, kv_len, dim)
        and value.shape[0] == batch
        and (structure.mask is None or structure.mask_covers(heads))
    ):
        return known
    request = AttentionRequest(query, key, value, structure, 1.0, per_head=rules, stored=stored)  # refuses
    same = request.query is query and request.key is key and request.value is value
    if not same or request.asks_nothing:
        return None
    spec = spec_of(request, forced)
    backend = choose(spec, forced) if rules is None else serving(spec, forced)
    if backend is None:
        return None
    launch: Launch = remember(kind, backend.prepare(spec, rules))
    return launch


def choose(spec: CallSpec, forced: str | None = None) -> Backend:
    """The backend for calls of this kind; remembered. BackendRefusal where `forced` cannot serve it."""
    found, passed = _found(spec, forced)
    if found is None:
        raise BackendRefusal(
            f"backend {forced!r} cannot serve this call ({spec.words()}): {' | '.join(passed)}. "
            'Use attn_implementation="adaattn" to let a backend be chosen.'
        )
    return found


def serving(spec: CallSpec, forced: str | None = None) -> Backend | None:
    """The backend that serves calls of this kind, None where all that may be asked refuse them; remembered."""
    return _found(spec, forced)[0]


def _found(spec: CallSpec, forced: str | None) -> tuple[Backend | None, tuple[str, ...]]:
    if spec.compiling:
        # a traced graph guards whatever it reads: a memory that grows would make it stale
        return _find(spec, forced)
    kind = "backend", spec, forced
    known: tuple[Backend | None, tuple[str, ...]] | None = launches.get(kind)
    return remember(kind, _find(spec, forced)) if known is None else known


def _find(spec: CallSpec, forced: str | None) -> tuple[Backend | None, tuple[str, ...]]:
    passed: list[str] = []
    for name in (forced,) if forced is not None else order(spec):
        reasons = refusals_of(name, spec)
        if not reasons:
            if not spec.compiling:
                _say(spec, name, passed)
            return BACKENDS[name], tuple(passed)
        passed.append(f"{name}: {'; '.join(reasons)}")
    return None, tuple(passed)


def attend(request: AttentionRequest, backend: str | None = None) -> AttentionResult:
    """Attention by the chosen backend, or by a named one (BackendRefusal if that cannot serve the request)."""
    spec = spec_of(request, backend)
    serves = choose(spec, backend)
    # extents are symbols in a graph, which would be guarded by what is asked of them
    if not spec.compiling and jit_trace() is None and request.asks_nothing:
        return nothing_seen(request)
    return serves.attend(request)


def _say(spec: CallSpec, name: str, passed: list[str]) -> None:
    kind = "said", spec.device, spec.dtype, name
    if kind not in launches:
        remember(kind, True)
        why = f" (passed over: {' | '.join(passed)})" if passed else ""
        logger.info("adaattn: %s serves %s %s%s", name, spec.device, str(spec.dtype).removeprefix("torch."), why)
