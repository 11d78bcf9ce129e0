"""Which backend serves a call: decided once per kind of call, never by trying.

`auto` takes the first backend of the device's order that refuses nothing, or one that was measured on this machine to
be clearly faster (`use_measured`). A backend that the user names is taken or raises with its refusals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from ..attention.request import AttentionRequest, AttentionResult, CallSpec
from ..errors import unknown
from .base import Backend, installed, spec_of
from .eager import EagerBackend
from .flash import FA2, FA3, FA3_FWD, Flash4Backend, FlashBackend
from .native.backend import NativeBackend
from .sdpa import SdpaBackend
from .triton import TritonBackend

logger = logging.getLogger("adaattn_hf")

_TRITON = TritonBackend()
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Flash4Backend(),
        FlashBackend(FA3),
        FlashBackend(FA3_FWD),
        FlashBackend(FA2),
        _TRITON,
        NativeBackend(),
        SdpaBackend(),
        EagerBackend(),
    )
}

# Bytes of keys and values beyond which one query on a processor reads them from memory, and the number of keys from
# which a CUDA device has to share those of one query out among its multiprocessors.
_CACHED_BYTES = 1 << 24
_SHARED_KEYS = 384

# Pairs of queries and keys of all heads from which a CUDA device computes for longer than any package needs to launch.
_HEAVY_PAIRS = 1 << 30

# Causal calls on Hopper in which our kernels are ahead of torch's, in pairs of all heads, as raced on an H200 over 100
# to 16k tokens: those that wait for the host, which launches ours sooner, but not batches of many heads; from 2k keys
# on, those of enough programs for every multiprocessor, of narrow heads more; and between, those of wide heads that are
# not so many that torch's programs, which begin and end faster, are ahead.
_LAUNCHED_PAIRS, _LAUNCHED_PER_KEY = 1 << 23, 1 << 14
_LONG_KEYS, _LONG_PAIRS, _LONG_PAIRS_SMALL = 2048, 1 << 25, 1 << 27
_MIDDLE_KEYS, _MIDDLE_PAIRS = 1024, 1 << 26

# Channels of a head up to which our own kernels are faster than flash-attn 4's over lists of blocks.
_SMALL_HEAD = 64

# Channels of a head with which packed documents of so many keys at most, down to a power of two, take our kernel for
# Hopper 0.86 of flash-attn 3's time (16 of 1k on an H100); of 3,000 keys both take the same.
_WIDE_HEAD, _SHORT_DOCUMENTS = 128, 1024

_MOST = 1024
"""Kinds of calls whose backend is remembered, and of those that nobody serves."""
_chosen: dict[tuple[CallSpec, str | None], Backend] = {}
_unserved: set[tuple[CallSpec, str | None]] = set()
_said: set[tuple[str, str, str]] = set()


Measured = Callable[[CallSpec, str], Sequence[str]]
"""Maps a call and the first backend of its order to those that were measured to be clearly faster, best first."""
_measured: Measured | None = None


class BackendRefusal(RuntimeError):
    """A backend that was asked for by name cannot serve the call."""


def order(spec: CallSpec) -> tuple[str, ...]:
    """Names of the backends that `auto` tries for a call, best first, as measured (docs/results/gpu_plans.md).

    On CUDA plain calls go to torch, but for heavy ones: from some hundred microseconds on flash-attn 3 and 4 are ahead
    of it by more than their longer way to a launch (3, built for inference, ahead of 4), and on Hopper our own kernels
    in most causal calls. What torch can only say with a mask goes to kernels that walk segments: to our own where
    flash-attn would have to gather tokens first or the call is light, else to flash-attn. What heads are asked apart is
    served in one launch or not at all: by our own if the call is light, since their way to a launch is the shorter one,
    or where they are the faster: of small heads, and on Hopper.
    """
    if spec.opaque or (spec.compiling and torch.onnx.is_in_onnx_export()):
        return ("sdpa", "eager")  # torch's own operations, which ONNX has, too
    if spec.device == "cpu":
        # one row per key/value head gives the kernels nothing to share, and from memory torch's product reads faster
        lone = spec.decode and spec.groups == 1 and spec.dtype == torch.float32 and spec.kind == "suffix"
        lone = lone and (spec.kv_bytes > _CACHED_BYTES or spec.compiling)
        # padding with holes is gathered into runs by the one, and becomes a dense mask in the other
        gathered = bool(spec.holes) and not spec.bias
        return ("sdpa", "native", "eager") if lone or gathered else ("native", "sdpa", "eager")
    if spec.device != "cuda":
        return ("sdpa", "eager")
    if spec.stored is not None and not spec.per_head:
        return ("triton", "eager")  # nobody else reads codes
    if spec.kind == "ragged" and spec.holes is None and not spec.decode:
        return ("sdpa", "eager")  # too small to look
    if spec.compiling and spec.decode and not spec.per_head:
        # a graph asks no kernel of torch's by name, and its own choice plans a kernel anew for every number of keys
        return ("triton", "sdpa", "eager")
    special = (
        spec.windowed or spec.softcap or spec.sink_logits or spec.kind in ("ragged", "window", "irregular")
    )
    if spec.per_head:
        light = spec.decode or spec.pairs < _HEAVY_PAIRS
        small = max(spec.head_dim, spec.head_dim_v) <= _SMALL_HEAD
        own = light or small or (not spec.needs_grad and _TRITON.specialised(spec))
        return ("triton", "fa4") if own else ("fa4", "triton")
    if not special and spec.decode and spec.keys >= _SHARED_KEYS and spec.dtype == torch.float32:
        return ("triton", "sdpa", "eager")
    if not special and (spec.decode or spec.kind in ("full", "causal")):
        own = spec.kind == "causal" and not spec.needs_grad and _ahead(spec) and _TRITON.specialised(spec)
        flash = ("fa3_fwd", "fa4", "fa3") if spec.pairs >= _HEAVY_PAIRS else ()
        return (*flash, *(("triton",) if own else ()), "sdpa", "eager")
    if spec.kind == "ragged" or spec.decode:
        if spec.needs_grad:
            return ("fa4", "triton", "fa3", "fa2", "sdpa", "eager")
        # three narrow heads of a group share their keys in our kernel for Hopper, which then is ahead of flash-attn 3
        three = spec.groups % 3 == 0 and max(spec.head_dim, spec.head_dim_v) <= _SMALL_HEAD
        short = spec.head_dim == _WIDE_HEAD and spec.packed <= _SHORT_DOCUMENTS
        if not (spec.packed and spec.pairs >= _HEAVY_PAIRS) or (
            (three or short) and _TRITON.specialised(spec)
        ):
            return ("triton", "fa3", "fa3_fwd", "fa2", "fa4", "sdpa", "eager")
    return ("fa3_fwd", "fa4", "fa3", "triton", "fa2", "sdpa", "eager")


def _ahead(spec: CallSpec) -> bool:
    """Whether our kernels for Hopper are ahead of torch's in a causal call that they serve."""
    if spec.pairs <= min(_LAUNCHED_PAIRS, _LAUNCHED_PER_KEY * spec.keys):
        return True
    small = spec.head_dim <= _SMALL_HEAD
    if spec.keys >= _LONG_KEYS:
        return spec.pairs >= (_LONG_PAIRS_SMALL if small else _LONG_PAIRS)
    return spec.keys >= _MIDDLE_KEYS and not small and spec.pairs <= _MIDDLE_PAIRS


def use_measured(measured: Measured | None) -> None:
    """Let measurements have a say in what `auto` takes, or none; what was chosen before is chosen anew."""
    global _measured
    _measured = measured
    _chosen.clear()


def by_name(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ValueError: Unknown name; lists the known ones and the nearest.
    """
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
    """Refuses a backend that can serve no call of this process, whatever it asks for.

    Raises:
        BackendRefusal: Says all that it lacks.
        ValueError: There is no backend of that name.
    """
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
    """What the installation lacks for a backend; a traced graph cannot look for packages, and need not."""
    return by_name(name).missing()


def traces(name: str) -> bool:
    """Whether a backend is installed, asked while a graph is traced."""
    return not _missing(name)


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
            if forced is None and not spec.compiling and _measured is not None:
                faster = (n for n in _measured(spec, name) if not refusals_of(n, spec))
                name = next(faster, name)
            backend = BACKENDS[name]
            if not spec.compiling:
                if len(_chosen) >= _MOST:
                    _chosen.clear()
                _chosen[(spec, forced)] = backend
                _say(spec, name, passed)
            return backend
        passed.append(f"{name}: {'; '.join(reasons)}")
    raise BackendRefusal(
        f"backend {forced!r} cannot serve this call ({spec.words()}): {' | '.join(passed)}. "
        'Use attn_implementation="adaattn" to let a backend be chosen.'
    )


def serving(spec: CallSpec, forced: str | None = None) -> Backend | None:
    """The backend that serves calls of this kind, None where all that may be asked refuse them; remembered."""
    # as in `choose`, a traced graph must not guard what grows
    if not spec.compiling and (spec, forced) in _unserved:
        return None
    if spec.compiling or (spec, forced) not in _chosen:
        names = (forced,) if forced is not None else order(spec)
        if all(refusals_of(name, spec) for name in names):
            if not spec.compiling:
                if len(_unserved) >= _MOST:
                    _unserved.clear()
                _unserved.add((spec, forced))
            return None
    return choose(spec, forced)


def attend(request: AttentionRequest, backend: str | None = None) -> AttentionResult:
    """Attention by the backend that is chosen for the request, or by the one that is named.

    Raises:
        BackendRefusal: The named backend cannot serve the call.
    """
    return choose(spec_of(request, backend), backend).attend(request)


def _say(spec: CallSpec, name: str, passed: list[str]) -> None:
    """One log line for each new pair of device and backend."""
    key = (spec.device, str(spec.dtype), name)
    if key not in _said:
        _said.add(key)
        why = f" (passed over: {' | '.join(passed)})" if passed else ""
        logger.info(
            "adaattn: %s serves %s %s%s", name, spec.device, str(spec.dtype).removeprefix("torch."), why
        )
