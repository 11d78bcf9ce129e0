"""What a backend is, and what backends share: refusals, attention written out, calls in which no query sees any key."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.request import AttentionRequest, AttentionResult, CallSpec, head_dim_of, narrowed
from ..attention.structure import Facts
from ..attention.tracing import autocast_device

if TYPE_CHECKING:
    from ..attention.heads import HeadRules
    from ..attention.stored import StoredKV
    from ..attention.structure import CallStructure

Made = TypeVar("Made")


class Launch(Protocol):
    """A kind of call, resolved: whatever had to be looked at, chosen or compiled for it is behind.

    It holds no tensor of a call. Lengths, offsets and addresses are read from what it is given, which whoever keeps it
    has found to be of its kind: dtypes, head sizes, devices and whether a gradient is wanted are not looked at again.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        structure: CallStructure,
        stored: StoredKV | None = None,
    ) -> Tensor:
        """Returns the output `[batch, q_len, heads, head_dim_v]`.

        Queries are `[batch, heads, q_len, head_dim]`, keys and values `[batch, num_kv_heads, kv_len, …]`. The factor on
        the scores is above 0, the structure settled. `stored` turns key and value into numbers where they are codes.
        """
        ...


SMALL_PAIRS = 1 << 14
"""Pairs of queries and keys up to which a padded batch is one masked call, and nobody looks whether it has holes."""

_SMALL_PAIRS_CUDA = 1 << 17
"""The same on CUDA, which masks more of them in the time in which the host waits to look."""


def spec_of(request: AttentionRequest, backend: str | None = None) -> CallSpec:
    """The facts by which the backend of a request is chosen, or by which one that was named refuses."""
    if torch.compiler.is_compiling():
        return CallSpec.of(request)
    structure, device = request.structure, request.query.device.type
    facts = structure.facts.get((device, backend is None)) or facts_of(structure, device, backend)
    return CallSpec.of(request, facts)


def facts_of(structure: CallStructure, device: str, backend: str | None = None) -> Facts:
    """Finds the facts of a structure on a device, and keeps them with it.

    Padding is looked at where that is worth it, and for a named backend always.
    """
    found = Facts.of(structure, device != "meta" and _worth_a_look(structure, device, backend))
    structure.facts[device, backend is None] = found
    return found


def _worth_a_look(structure: CallStructure, device: str, backend: str | None) -> bool:
    if structure.kind != "ragged":
        return False
    if backend is not None:
        return True
    pairs = structure.batch * structure.q_len * structure.kv_len
    if device == "cuda":
        # a step reads its padding and offset where they are: looking at them would halt it
        return not structure.one_run_a_row if structure.q_len == 1 else pairs > _SMALL_PAIRS_CUDA
    return pairs > SMALL_PAIRS or device != "cpu"


@torch.compiler.assume_constant_result
def installed(module: str, whole: bool = False) -> bool:
    """Whether a module can be imported; it is not. A traced graph cannot look for it, and takes the answer as it is.

    With `whole` a directory of that name without a file of its own does not count.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return False
    found = importlib.util.find_spec(module)
    return found is not None and (not whole or found.origin is not None)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def derived_on(structure: CallStructure, device: torch.device, make: Callable[..., Made], *arguments: Any) -> Made:
    """What `make(structure, device, *arguments)` computes on a device, shared by the layers of a pass.

    Another stream makes its own, as it would not wait for this one; so does a graph that is captured, which computes it
    when it is replayed.
    """
    if capturing(device):
        return make(structure, device, *arguments)
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    made: Made = structure.derived(_made_on_stream, stream, make, device, *arguments)
    return made


def _made_on_stream(
    structure: CallStructure, stream: int, make: Callable[..., Made], device: torch.device, *arguments: Any
) -> Made:
    return make(structure, device, *arguments)


def by_requests(attend: Callable[[AttentionRequest], AttentionResult], rules: HeadRules | None) -> Launch:
    """The launch that makes a request of each call, with the rules per head of all, and has `attend` answer it."""

    def launch(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        structure: CallStructure,
        stored: StoredKV | None = None,
    ) -> Tensor:
        request = AttentionRequest(query, key, value, structure, scaling, per_head=rules, stored=stored)
        return attend(request).out

    return launch


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
        return ()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """All the reasons why a call of this kind cannot be served; empty if it can."""
        ...

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Compute attention. Called only with requests whose spec is not refused."""
        ...

    def prepare(self, spec: CallSpec, rules: HeadRules | None = None) -> Launch:
        """The launch for all calls of a kind that is not refused, whose rules per head are `rules`.

        Asked once for each kind, outside of traced graphs, for calls without dropout, bias, softcap or learned sinks,
        whose factor is positive, and whose log-sum-exp nobody needs.
        """
        return by_requests(self.attend, rules)

    def launches(self, rules: HeadRules) -> tuple[str, ...]:
        """Name of the launch that serves each key/value head of a request with such rules; one launch for all."""
        return ("one launch",) * len(rules.windows)


def bound(backend: Backend, request: AttentionRequest) -> Callable[[], object]:
    """Returns an ordinary call as layers make it, with its tensors; where a gradient is wanted, both passes.

    The request is without dropout, bias, softcap and learned sinks.
    """
    spec = spec_of(request)
    inputs = request.query, request.key, request.value
    structure = request.structure if spec.compiling else request.structure.settled()
    launch = backend.prepare(spec, request.per_head)
    if spec.needs_grad:
        grad = torch.ones_like(launch(*inputs, request.scaling, structure))
        return lambda: torch.autograd.grad(launch(*inputs, request.scaling, structure), inputs, grad)
    return lambda: launch(*inputs, request.scaling, structure, request.stored)


OPTIONS = {
    "dropout": "dropout",
    "softcap": "softcap",
    "sink_logits": "learned sinks",
    "bias": "additive bias",
    "need_lse": "log-sum-exp",
    "needs_grad": "gradient",
    "compiling": "form for traced graphs",
    "opaque": "tensors without memory",
    "stored": "keys and values stored as codes",
    "head_windows": "windows per head",
    "head_precision": "{} products per head",
    "head_until": "rules up to a position per head",
}
"""What a call may ask for beside attention over its structure: facts of a `CallSpec`, and how refusals name them."""


def unnamed(spec: CallSpec, kernels: str, serves: Collection[str] = ()) -> tuple[str, ...]:
    """The refusals of all that a backend does not name.

    `kernels` is the subject of a sentence in the plural; `serves` are those of `OPTIONS` that it serves, or refuses in
    words of its own.
    """
    asked = {fact: getattr(spec, fact) for fact in OPTIONS if fact not in serves}
    return tuple(
        f"{kernels} have no {OPTIONS[fact].format(value)}"
        for fact, value in asked.items()
        if value and value != "model"
    )


def run_refusals(spec: CallSpec, kernels: str) -> list[str]:
    """The refusals of packed kernels, which count windows from the last key of a run; `kernels` as in `unnamed`."""
    if spec.kind != "ragged" or spec.compiling:
        return []
    reasons = []
    if not spec.aligned and (spec.windowed or spec.head_windows):
        reasons.append(f"{kernels} have no window for queries behind the last key of their run")
    if spec.decode and spec.holes is None:
        reasons.append(f"{kernels} take no padding with holes, and nobody has looked whether it has any")
    return reasons


def softmax_parts(
    request: AttentionRequest,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bias: Tensor | None = None,
    work: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[batch, heads, q_len, kv_len]` by separate operations, in at least fp32 and without dropout.

    With them come each row's largest score, 0 where that is infinite, and its sum of exponentials, as columns. `bias`
    is added before the mask. `work` is the dtype of the products; that of the softmax when None.
    """
    batch, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1], key.shape[2]
    # half precision would overflow in products of logits beyond 6.5e4, and round those of a few hundred
    wide = torch.promote_types(query.dtype, torch.float32)
    work = work or wide
    # autocast would demote these products, and a finite mask value of fp32 overflows in bf16
    with torch.autocast(autocast_device(query), enabled=False):
        grouped = query.to(work).reshape(batch, kv_heads, heads // kv_heads * q_len, dim)
        scores = torch.matmul(grouped, key.to(work).transpose(2, 3)).view(batch, heads, q_len, kv_len)
        scores = scores.to(wide) * request.scaling
        if request.softcap is not None:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        if bias is not None:
            scores = scores + narrowed(bias, wide)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        top = scores.detach().amax(dim=3, keepdim=True)
        sink = None
        if request.sink_logits is not None:
            sink = request.sink_logits.to(wide).reshape(1, -1, 1, 1)
            top = torch.maximum(top, sink.detach())
        top = top.masked_fill(torch.isinf(top), 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=3, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        return weights / total.masked_fill(total == 0, 1.0), top, total


def weighted(weights: Tensor, value: Tensor, dropout: float) -> Tensor:
    """The sum of values by weights `[batch, heads, q_len, kv_len]`, some of which are dropped."""
    batch, heads, q_len, kv_len = weights.shape
    kv_heads = value.shape[1]
    weights = weights.to(value.dtype)
    weights = F.dropout(weights, dropout) if dropout else weights
    with torch.autocast(autocast_device(value), enabled=False):
        grouped = weights.reshape(batch, kv_heads, heads // kv_heads * q_len, kv_len)
        return torch.matmul(grouped, value).view(batch, heads, q_len, value.shape[3])


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
