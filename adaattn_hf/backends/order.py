"""The order in which `auto` tries backends, by the kind of a call, as measured: of a table the first match counts.

The constants below are where one way becomes faster than another.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..attention.kind import BIAS, OPAQUE, SINKS, SOFTCAP, WINDOW, CallKind
from .triton import TritonBackend

TRITON = TritonBackend()

# Bytes of keys and values beyond which one query on a processor reads them from memory, and the number of keys from
# which a CUDA device has to share those of one query out among its multiprocessors.
_CACHED_BYTES = 1 << 24
_SHARED_KEYS = 384

# Bytes of keys and values from which a step in half precision takes longer on an H100 than any host needs to launch it:
# ours is as fast as cuDNN's kernel then, and torch's flash kernel takes up to 1.7 times as long (32 rows of 12 heads).
_STEP_BYTES = 1 << 27

# Pairs of queries and keys of all heads from which a CUDA device computes for longer than any package needs to launch.
_HEAVY_PAIRS = 1 << 30

# Causal calls on Hopper in which our kernels are ahead of torch's, in pairs of all heads, as raced on an H200 over 100
# to 16k tokens: those that wait for the host, which launches ours sooner, but not batches of many heads; from 2k keys
# on, those of enough programs for every multiprocessor, of narrow heads more; and between, those of wide heads that are
# not so many that torch's programs, which begin and end faster, are ahead.
_LAUNCHED_PAIRS, _LAUNCHED_PER_KEY = 1 << 23, 1 << 14
_LONG_KEYS, _LONG_PAIRS, _LONG_PAIRS_SMALL = 2048, 1 << 25, 1 << 27
_MIDDLE_KEYS, _MIDDLE_PAIRS = 1024, 1 << 26

# Channels of a narrow head, of which our kernels need more pairs to be ahead.
_SMALL_HEAD = 64

# Channels of a head with which packed documents of so many keys at most, down to a power of two, take our kernel for
# Hopper 0.86 of flash-attn 3's time (16 of 1k on an H100); of 3,000 keys both take the same.
_WIDE_HEAD, _SHORT_DOCUMENTS = 128, 1024


def _from_memory(kind: CallKind) -> bool:
    """fp32 decode without groups reuses no key: it is bound by memory, of which torch's product has more bandwidth."""
    lone = kind.decode and kind.groups == 1 and kind.dtype == torch.float32 and kind.shape == "suffix"
    return kind.device.type == "cpu" and lone and (kind.kv_bytes > _CACHED_BYTES or kind.compiling)


def _special(kind: CallKind) -> bool:
    return bool(kind.features & (WINDOW | SOFTCAP | SINKS)) or kind.shape in ("ragged", "window", "irregular")


def _shared_step(kind: CallKind) -> bool:
    """Torch would plan a kernel for each number of keys, and its kernel for fp32 does not share keys out."""
    if _special(kind) or not kind.decode or kind.keys < _SHARED_KEYS:
        return False
    read = kind.pairs // kind.groups * (kind.head_dim + kind.head_dim_v) * kind.dtype.itemsize
    heavy = read >= _STEP_BYTES and not kind.needs_grad
    return kind.dtype == torch.float32 or (heavy and TRITON.specialised(kind))


def _plain(kind: CallKind) -> bool:
    return not _special(kind) and (kind.decode or kind.shape in ("full", "causal"))


def _ahead(kind: CallKind) -> bool:
    """Plain causal calls in which our kernel for Hopper is ahead of torch's."""
    if not _plain(kind) or kind.shape != "causal" or kind.needs_grad:
        return False
    if kind.pairs <= min(_LAUNCHED_PAIRS, _LAUNCHED_PER_KEY * kind.keys):
        ahead = True
    elif kind.keys >= _LONG_KEYS:
        ahead = kind.pairs >= (_LONG_PAIRS_SMALL if kind.head_dim <= _SMALL_HEAD else _LONG_PAIRS)
    else:
        ahead = kind.keys >= _MIDDLE_KEYS and kind.head_dim > _SMALL_HEAD and kind.pairs <= _MIDDLE_PAIRS
    return ahead and TRITON.specialised(kind)


def _heavy(kind: CallKind) -> bool:
    return kind.pairs >= _HEAVY_PAIRS


def _over_runs(kind: CallKind) -> bool:
    return kind.shape == "ragged" or kind.decode


def _read_in_place(kind: CallKind) -> bool:
    """Our kernels gather nothing; flash-attn 3 is ahead in heavy packed rows, but for two kinds on Hopper.

    Three narrow heads of a group share their keys in our kernel there, and short documents of wide heads.
    """
    if not _over_runs(kind):
        return False
    short = kind.head_dim == _WIDE_HEAD and kind.packed <= _SHORT_DOCUMENTS
    narrow = max(kind.head_dim, kind.head_dim_v) <= _SMALL_HEAD
    ours = (kind.groups % 3 == 0 and narrow) or short
    return not (kind.packed and _heavy(kind)) or (ours and TRITON.specialised(kind))


class Rule(NamedTuple):
    """Calls, how to know them, the backends that are tried for them, best first, and the page that measured it."""

    calls: str
    holds: Callable[[CallKind], bool]
    names: tuple[str, ...]
    page: str


RULES = (
    Rule("tensors without memory, ONNX",
         lambda kind: bool(kind.features & OPAQUE) or (kind.compiling and torch.onnx.is_in_onnx_export()),
         ("sdpa", "eager"), ""),
    Rule("CPU: one query, keys in memory", _from_memory, ("sdpa", "native", "eager"), "native_cpu.md"),
    # gathered into runs by torch's way; the native kernels would read a dense mask
    Rule("CPU: padding with holes",
         lambda kind: kind.device.type == "cpu" and kind.holes is True and not kind.features & BIAS,
         ("sdpa", "native", "eager"), "native_cpu.md"),
    Rule("CPU", lambda kind: kind.device.type == "cpu", ("native", "sdpa", "eager"), "native_cpu.md"),
    Rule("other devices than CUDA", lambda kind: kind.device.type != "cuda", ("sdpa", "eager"), ""),
    Rule("stored as codes", lambda kind: kind.stored is not None and not kind.per_head, ("triton", "eager"),
         "gpu_plans.md#one-decode-step-on-a-quantised-cache"),
    Rule("small batches with padding",
         lambda kind: kind.shape == "ragged" and kind.holes is None and not kind.decode, ("sdpa", "eager"),
         "gpu_plans.md#masks"),
    Rule("a compiled step", lambda kind: kind.compiling and kind.decode and not kind.per_head,
         ("triton", "sdpa", "eager"), "gpu_plans.md#generation-with-a-static-cache"),
    Rule("rules per head", lambda kind: kind.per_head, ("triton",), "gpu_plans.md#windows-per-head-prefill"),
    Rule("plain step: heavy, or float32", _shared_step, ("triton", "sdpa", "eager"),
         "gpu_plans.md#decode-steps-each-with-a-new-number-of-keys"),
    Rule("plain causal, heavy, on Hopper", lambda kind: _heavy(kind) and _ahead(kind),
         ("fa3_fwd", "fa4", "triton", "sdpa", "eager"), "gpu_plans.md#short-and-middling-causal-calls"),
    Rule("plain causal on Hopper", _ahead, ("triton", "sdpa", "eager"),
         "gpu_plans.md#short-and-middling-causal-calls"),
    Rule("plain, heavy", lambda kind: _plain(kind) and _heavy(kind), ("fa3_fwd", "fa4", "sdpa", "eager"),
         "gpu_plans.md#exact-causal-attention"),
    Rule("plain", _plain, ("sdpa", "eager"), "gpu_plans.md#exact-causal-attention"),
    Rule("runs with gradients, light", lambda kind: kind.light_training, ("sdpa", "fa4", "triton", "eager"),
         "gpu_plans.md#packed-and-padded-calls-compared-with-dense-ones"),
    Rule("runs with gradients", lambda kind: _over_runs(kind) and kind.needs_grad,
         ("fa4", "triton", "sdpa", "eager"),
         "gpu_plans.md#packed-and-padded-calls-compared-with-dense-ones"),
    Rule("runs, one query", _read_in_place, ("triton", "fa3_fwd", "fa4", "sdpa", "eager"),
         "gpu_plans.md#packed-and-padded-calls-compared-with-dense-ones"),
    Rule("heavy packed rows, windows, softcaps, sinks, dense masks", lambda kind: True,
         ("fa3_fwd", "fa4", "triton", "sdpa", "eager"), "gpu_plans.md#masks"),
)  # fmt: skip
"""From CPUs to CUDA; the first rule that holds counts. docs/architecture.md shows it, which a test compares."""


def order(kind: CallKind) -> tuple[str, ...]:
    """Names of the backends that `auto` tries for calls of a kind, best first."""
    return next(rule.names for rule in RULES if rule.holds(kind))
