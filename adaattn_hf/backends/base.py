"""The `Backend` protocol, and what backends share: refusals, and calls in which no query sees any key."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..attention.request import AttentionRequest, AttentionResult, CallSpec, head_dim_of

if TYPE_CHECKING:
    from ..attention.heads import HeadRules

FastCall = Callable[..., Tensor]
"""Maps query, key, value, scaling and, of codes, their `StoredKV` to the output `[batch, q_len, heads, head_dim_v]`;
see `Backend.fast_call`."""

SMALL_PAIRS = 1 << 14
"""Pairs of queries and keys up to which a padded batch is one masked call, and nobody looks whether it has holes."""

_SMALL_PAIRS_CUDA = 1 << 17
"""The same on CUDA, which masks more of them in the time in which the host waits to look."""


def spec_of(request: AttentionRequest, backend: str | None = None) -> CallSpec:
    """The facts by which the backend of a request is chosen, or by which one that was named refuses.

    Padding is looked at where that is worth it, and for a named backend always.
    """
    structure = request.structure
    if structure.kind != "ragged" or torch.compiler.is_compiling():
        return CallSpec.of(request)
    pairs = structure.batch * structure.q_len * structure.kv_len
    if request.query.is_cuda:
        # a step reads its padding and offset where they are: looking at them would halt it
        worth = not structure.one_run_a_row if structure.q_len == 1 else pairs > _SMALL_PAIRS_CUDA
    else:
        worth = pairs > SMALL_PAIRS or not request.query.is_cpu
    return CallSpec.of(request, look=worth or backend is not None)


@torch.compiler.assume_constant_result
def installed(module: str, whole: bool = False) -> bool:
    """Whether a module can be imported; it is not. A traced graph cannot look for it, and takes the answer as it is.

    Args:
        module: Its name.
        whole: A directory of that name without a file of its own does not count.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return False
    found = importlib.util.find_spec(module)
    return found is not None and (not whole or found.origin is not None)


class Backend(Protocol):
    """Computes attention for the requests that it does not refuse.

    A backend never calls another one and never falls back.

    Attributes:
        name: Name in `adaattn_<name>`, in logs and in reports.
        device: Type of the only devices that it serves; empty where it is not bound to one.
        package: Python package without which it serves nothing; empty for none.
    """

    name: str
    device: str = ""
    package: str = ""

    def missing(self) -> tuple[str, ...]:
        """All that this installation lacks for the backend to run at all; empty if nothing. Imports lazily."""
        ...

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """All the reasons why a call of this kind cannot be served; empty if it can."""
        ...

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Compute attention. Called only with requests whose spec is not refused."""
        ...

    def fast_call(self, spec: CallSpec, request: AttentionRequest) -> FastCall | None:
        """`attend` without a request around it, None if the backend has nothing quicker.

        Asked once for calls like this request: of its structure, rules per head, shapes, dtypes and device, outside of
        traced graphs, without dropout, bias, softcap or learned sinks, whose factor is positive, and whose log-sum-exp
        nobody needs. Whoever keeps the answer compares `facts_of`; nothing else does before the kernels read memory.
        Keeps no tensor of the request.
        """
        return None

    def head_launches(self, rules: HeadRules) -> tuple[str, ...]:
        """Name of the launch that serves each key/value head of a request with such rules; one launch for all."""
        return ("one launch",) * len(rules.windows)


def facts_of(
    backend: str | None, query: Tensor, key: Tensor, value: Tensor, stored: bool
) -> tuple[Hashable, ...]:
    """All that must be equal for a remembered call to be repeated with other tensors.

    Their types tell tensors that hold memory from those that trace, wrap or shard. Whoever keeps a `FastCall` compares
    this: some kernels read memory without asking again where it lies.

    Args:
        backend: Name of the backend that was asked for, None where it was chosen.
        query, key, value: The tensors of the call.
        stored: Whether keys and values are codes of a quantised cache.
    """
    return (
        backend,
        stored,
        query.dtype,
        key.dtype,
        value.dtype,
        query.shape,
        key.shape,
        value.shape,
        query.device,
        key.device,
        value.device,
        query.__class__,
        key.__class__,
        value.__class__,
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )


def layer_call(backend: Backend, request: AttentionRequest) -> Callable[[], object]:
    """Returns an exact call as layers make it that follow the first one of a pass: the backend has been chosen.

    Where a gradient is wanted it is both passes.

    Args:
        backend: The backend that was chosen.
        request: The call, without dropout, bias, softcap or learned sinks.
    """
    spec = spec_of(request)
    if spec.needs_grad:
        inputs, grad = (
            (request.query, request.key, request.value),
            torch.ones_like(backend.attend(request).out),
        )
        return lambda: torch.autograd.grad(backend.attend(request).out, inputs, grad)
    bare = backend.fast_call(spec, request)
    if bare is None:
        return lambda: backend.attend(request)
    return lambda: bare(request.query, request.key, request.value, request.scaling)


def head_refusals(spec: CallSpec, kernels: str) -> list[str]:
    """The refusals of a backend that computes the same for every head.

    Args:
        spec: Facts of the call.
        kernels: What the backend runs, as the subject of a sentence in the plural.
    """
    asked = {
        "windows": spec.head_windows,
        f"{spec.head_precision} products": spec.head_precision != "model",
        "rules up to a position": spec.head_until,
    }
    return [f"{kernels} have no {name} per head" for name, wanted in asked.items() if wanted]


def run_refusals(spec: CallSpec, kernels: str) -> list[str]:
    """The refusals of packed kernels, which count windows from the last key of a run.

    Args:
        spec: Facts of the call.
        kernels: As in `head_refusals`.
    """
    if spec.kind != "ragged" or spec.compiling:
        return []
    reasons = []
    if not spec.aligned and (spec.windowed or spec.head_windows):
        reasons.append(f"{kernels} have no window for queries behind the last key of their run")
    if spec.decode and spec.holes is None:
        reasons.append(f"{kernels} take no padding with holes, and nobody has looked whether it has any")
    return reasons


def nothing_seen(request: AttentionRequest) -> AttentionResult:
    """The answer to a call in which no query sees any key: zeros, through which a gradient of zeros flows."""
    batch, heads, q_len, _ = request.query.shape
    out = request.query.new_zeros((batch, q_len, heads, head_dim_of(request.value)))
    if torch.is_grad_enabled():
        for tensor in (request.query, request.key, request.value, request.bias, request.sink_logits):
            if tensor is not None and tensor.requires_grad:
                out = out + (tensor[:0].sum() * 0).to(out.dtype)
    if not request.need_lse:
        return AttentionResult(out)
    if request.sink_logits is None:
        lse = request.query.new_full((batch, heads, q_len), float("-inf"), dtype=torch.float32)
    else:
        # the learned sink alone is in the sum
        lse = request.sink_logits.detach().float().reshape(1, -1, 1).repeat(batch, 1, q_len)
    return AttentionResult(out, lse)
