"""Which backend serves a call: decided once per kind of call, never by trying.

`auto` takes the first backend of the device's order that refuses nothing. A backend that the user names is taken or
raises with its refusals.
"""

from __future__ import annotations

import difflib
import logging

import torch

from ..request import CallSpec
from .base import Backend
from .eager import EagerBackend
from .flash import FA2, FA3, FA3_FWD, FlashBackend
from .native.backend import NativeBackend
from .sdpa import SdpaBackend
from .triton import TritonBackend

__all__ = ["BACKENDS", "BackendRefusal", "choose", "order", "refusals_of"]

logger = logging.getLogger("adaattn_hf")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        FlashBackend(FA3),
        FlashBackend(FA3_FWD),
        FlashBackend(FA2),
        TritonBackend(),
        NativeBackend(),
        SdpaBackend(),
        EagerBackend(),
    )
}

_chosen: dict[tuple[CallSpec, str | None], Backend] = {}
_said: set[tuple[str, str, str]] = set()


class BackendRefusal(RuntimeError):
    """A backend that was asked for by name cannot serve the call."""


def order(spec: CallSpec) -> tuple[str, ...]:
    """Names of the backends that `auto` tries for a call, best first, as measured (docs/results/gpu_kernels.md).

    On CUDA plain calls go to torch: on Hopper its cuDNN kernel is as fast as flash-attn 3 in prefill and several times
    faster for one small decode step. What torch can only say with a mask goes to kernels that walk segments: to
    our own where flash-attn would have to gather tokens first, else to flash-attn.
    """
    if spec.device == "cpu":
        # one row per key/value head gives the kernels nothing to share, and from memory torch's product reads faster
        lone = spec.decode and spec.groups == 1 and spec.dtype == torch.float32 and spec.kind == "suffix"
        lone = lone and (spec.streamed or spec.compiling)
        # padding with holes is gathered into runs by the one, and becomes a dense mask in the other
        gathered = spec.kind == "holes" and not spec.bias
        return ("sdpa", "native", "eager") if lone or gathered else ("native", "sdpa", "eager")
    if spec.device != "cuda":
        return ("sdpa", "eager")
    if spec.kind == "small":
        return ("sdpa", "eager")
    special = (
        spec.windowed or spec.softcap or spec.sink_logits or spec.kind in ("ragged", "window", "irregular")
    )
    if not special and spec.streamed and spec.dtype == torch.float32:
        return ("triton", "sdpa", "eager")
    if not special and (spec.decode or spec.kind in ("full", "causal")):
        return ("sdpa", "eager")
    if spec.kind == "ragged" or spec.decode:
        return ("triton", "fa3", "fa3_fwd", "fa2", "sdpa", "eager")
    return ("fa3", "fa3_fwd", "fa2", "triton", "sdpa", "eager")


def by_name(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: Unknown name; lists the known ones and the nearest.
    """
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend: got {name!r}, expected one of {', '.join(sorted(BACKENDS))}.{hint}")
    return BACKENDS[name]


def refusals_of(name: str, spec: CallSpec) -> tuple[str, ...]:
    """All the reasons why a backend cannot serve a call: what is missing here, then what the call asks for."""
    return (*_missing(name), *by_name(name).refusals(spec))


@torch.compiler.assume_constant_result
def _missing(name: str) -> tuple[str, ...]:
    """What the installation lacks for a backend; a traced graph cannot look for packages, and need not."""
    return by_name(name).missing()


def choose(spec: CallSpec, forced: str | None = None) -> Backend:
    """The backend for calls of this kind; remembered.

    Raises:
        BackendRefusal: `forced` cannot serve the call.
    """
    # A traced graph guards whatever it reads: a memory that grows would make it stale.
    known = None if spec.compiling else _chosen.get((spec, forced))
    if known is not None:
        return known
    names = (forced,) if forced is not None else order(spec)
    passed: list[str] = []
    for name in names:
        reasons = refusals_of(name, spec)
        if not reasons:
            backend = BACKENDS[name]
            if not spec.compiling:
                _chosen[(spec, forced)] = backend
                _say(spec, name, passed)
            return backend
        passed.append(f"{name}: {'; '.join(reasons)}")
    raise BackendRefusal(
        f"backend {forced!r} cannot serve this call ({spec.words()}): {' | '.join(passed)}. "
        'Use attn_implementation="adaattn" to let a backend be chosen.'
    )


def _say(spec: CallSpec, name: str, passed: list[str]) -> None:
    """One log line for each new pair of device and backend."""
    key = (spec.device, str(spec.dtype), name)
    if key not in _said:
        _said.add(key)
        why = f" (passed over: {' | '.join(passed)})" if passed else ""
        logger.info(
            "adaattn: %s serves %s %s%s", name, spec.device, str(spec.dtype).removeprefix("torch."), why
        )
