"""What a backend is, and what backends share: refusals, what is derived on a device, calls that see no key."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch

from ..attention.call import AttentionCall, AttentionResult, head_dim_of
from ..attention.kind import OPTIONS, CallKind
from ..attention.structure import MaskStructure

if TYPE_CHECKING:
    from ..attention.heads import HeadRules

Made = TypeVar("Made")

PerHead: TypeAlias = "HeadRules | None"
"""Rules per head, None where all heads of a call do the same."""

Kernel = Callable[[AttentionCall], AttentionResult]
"""Computes calls of one kind: whatever had to be looked at, chosen or compiled for the kind is behind it.

It holds no tensor of a call. Lengths, offsets, addresses and the factor on the scores are read from the call, which
`select.attend` has found to be of the kind: dtypes, head sizes, devices and whether a gradient is wanted are not looked
at again. Kernels for rules per head are kept with these rules, and may hold tensors made of them.
"""


@dataclass(frozen=True)
class Supports:
    """What a backend serves, as data.

    Attributes:
        kernels: Its subject in sentences, in the plural.
        features: The options of a call, bits of `attention.kind`, that it serves, or refuses in words of its own.
        device: Type of the only devices that it serves; empty where it is not bound to one.
        dtypes: Those of the query that it serves; empty for all.
        widest: Most channels of a head.
        multiple: What the channels of a head must be a multiple of.
        equal: Whether values must have as many channels as keys.
        dense: Whether it takes a dense mask.
        unless: Combinations of bits that are refused, each with its sentence.
    """

    kernels: str
    features: int
    device: str = ""
    dtypes: tuple[torch.dtype, ...] = ()
    widest: int = 0
    multiple: int = 1
    equal: bool = False
    dense: bool = True
    unless: tuple[tuple[int, str], ...] = ()

    def refusals(self, kind: CallKind) -> list[str]:
        """All the reasons why a call of a kind cannot be served; empty if it can."""
        kernels, features, sizes = self.kernels, kind.features, (kind.head_dim, kind.head_dim_v)
        reasons = [f"{kernels} have no {name}" for bit, name in OPTIONS.items() if features & bit & ~self.features]
        if self.device and kind.device.type != self.device:
            where = "CPUs" if self.device == "cpu" else "CUDA devices"
            reasons.append(f"{kernels} run on {where}, got {kind.device.type} tensors")
        if self.dtypes and kind.dtype not in self.dtypes:
            names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
            dtypes = f"{', '.join(names[:-1])} or {names[-1]}"
            reasons.append(f"{kernels} compute in {dtypes}, got {str(kind.dtype).removeprefix('torch.')}")
        if self.widest and max(sizes) > self.widest:
            reasons.append(f"{kernels} serve head sizes up to {self.widest}, got {max(sizes)}")
        if any(size % self.multiple for size in sizes):
            reasons.append(
                f"{kernels} take head sizes that are multiples of {self.multiple}, got {sizes[0]}, {sizes[1]}"
            )
        if self.equal and sizes[0] != sizes[1]:
            reasons.append(f"{kernels} take equal head sizes of keys and values, got {sizes[0]}, {sizes[1]}")
        if not self.dense and kind.shape == "irregular":
            reasons.append(f"{kernels} take no dense mask")
        return reasons + [why for bits, why in self.unless if features & bits == bits]


class Backend(Protocol):
    """Computes attention for the kinds of calls that it does not refuse.

    A backend never calls another one and never falls back.

    Attributes:
        name: Name in `adaattn_<name>`, in logs and in reports.
        supports: What it serves.
        package: Python package without which it serves nothing; empty for none.
    """

    name: str
    supports: Supports
    package: str = ""

    def missing(self) -> tuple[str, ...]:
        """All that this installation lacks for the backend to run at all; empty if nothing. Imports lazily."""
        return ()

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """All the reasons why a call of this kind cannot be served; empty if it can."""
        return tuple(self.supports.refusals(kind))

    def kernel(self, kind: CallKind, rules: PerHead) -> Kernel:
        """The kernel of a kind that is not refused, for calls whose rules per head are `rules`: the only way in.

        Asked once for each kind, and rules; in a traced graph at each call. Calls have something to compute.
        """
        ...

    def launch_name(self, precision: str) -> str:
        """Name of the launch that serves the heads of a precision in a call with rules per head; one launch for all."""
        return "one launch"


@torch.compiler.assume_constant_result
def installed(module: str, whole: bool = False) -> bool:
    """Whether a module can be imported; it is not. A traced graph cannot look for it, and takes the answer as it is.

    With `whole` a directory of that name without a file of its own does not count.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return False
    spec = importlib.util.find_spec(module)
    return spec is not None and (not whole or spec.origin is not None)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def derived_on(structure: MaskStructure, device: torch.device, make: Callable[..., Made], *arguments: Any) -> Made:
    """What `make(structure, device, *arguments)` computes on a device, shared by the layers of a pass.

    Another stream makes its own, as it would not wait for this one; so does a graph that is captured, which computes it
    when it is replayed.
    """
    if capturing(device):
        return make(structure, device, *arguments)
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    made: Made = structure.cached(_made_on_stream, stream, make, device, *arguments)
    return made


def _made_on_stream(
    structure: MaskStructure, stream: int, make: Callable[..., Made], device: torch.device, *arguments: Any
) -> Made:
    return make(structure, device, *arguments)


def zero_output(call: AttentionCall) -> AttentionResult:
    """The answer to a call in which no query sees any key: zeros, through which a gradient of zeros flows."""
    batch, heads, q_len, _ = call.query.shape
    out = call.query.new_zeros((batch, q_len, heads, head_dim_of(call.value)))
    if torch.is_grad_enabled():
        for tensor in (call.query, call.key, call.value, call.bias, call.sink_logits):
            if tensor is not None and tensor.requires_grad:
                out = out + (tensor[:0].sum() * 0).to(out.dtype)
    if not call.need_lse:
        return AttentionResult(out)
    if call.sink_logits is None:
        lse = call.query.new_full((batch, heads, q_len), float("-inf"), dtype=torch.float32)
    else:
        # the learned sink alone is in the sum
        lse = call.sink_logits.detach().float().reshape(1, -1, 1).repeat(batch, 1, q_len)
    return AttentionResult(out, lse)
