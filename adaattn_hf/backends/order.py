"""The order in which `auto` tries backends, by the facts of a call, as measured."""

from __future__ import annotations

import torch

from ..attention.kind import SINKS, SOFTCAP, WINDOW, COMPILING, OPAQUE, BIAS, CallSpec
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

# Channels of a head up to which our own kernels are faster than flash-attn 4's over lists of blocks.
_SMALL_HEAD = 64

# Channels of a head with which packed documents of so many keys at most, down to a power of two, take our kernel for
# Hopper 0.86 of flash-attn 3's time (16 of 1k on an H100); of 3,000 keys both take the same.
_WIDE_HEAD, _SHORT_DOCUMENTS = 128, 1024


def order(spec: CallSpec) -> tuple[str, ...]:
    """Names of the backends that `auto` tries for a call, best first, as measured (docs/results/gpu_plans.md).

    | on CUDA | first |
    | --- | --- |
    | plain calls | torch; heavy ones: flash-attn 3, built for inference, or 4; on Hopper where `_ahead`: ours |
    | heavy plain steps | ours on Hopper, where torch would plan a kernel for each number of keys |
    | runs (padding, documents), one query | ours, which gathers nothing; heavy packed rows: flash-attn 3 |
    | runs with gradients | flash-attn 4; light ones: torch with a mask |
    | windows, softcap, sinks, dense masks | flash-attn 3 or 4 |
    | rules per head | ours for light calls, small heads and on Hopper, else flash-attn 4; nobody else |

    On a processor the native kernels are first, but for padding with holes and lone rows from memory.
    """
    if spec.features & OPAQUE or (spec.compiling and torch.onnx.is_in_onnx_export()):
        return ("sdpa", "eager")  # torch's own operations, which ONNX has, too
    if spec.device.type == "cpu":
        # fp32 decode without groups reuses no key: it is bound by memory, of which torch's product has more bandwidth
        lone = spec.decode and spec.groups == 1 and spec.dtype == torch.float32 and spec.shape == "suffix"
        lone = lone and (spec.kv_bytes > _CACHED_BYTES or spec.compiling)
        # padding with holes is gathered into runs by the one, and becomes a dense mask in the other
        gathered = bool(spec.holes) and not spec.features & BIAS
        return ("sdpa", "native", "eager") if lone or gathered else ("native", "sdpa", "eager")
    if spec.device.type != "cuda":
        return ("sdpa", "eager")
    if spec.stored is not None and not spec.per_head:
        return ("triton", "eager")  # nobody else reads codes
    if spec.shape == "ragged" and spec.holes is None and not spec.decode:
        return ("sdpa", "eager")  # too small to look
    if spec.compiling and spec.decode and not spec.per_head:
        # a graph asks no kernel of torch's by name, and its own choice plans a kernel anew for every number of keys
        return ("triton", "sdpa", "eager")
    special = spec.features & (WINDOW | SOFTCAP | SINKS) or spec.shape in ("ragged", "window", "irregular")
    if spec.per_head:
        light = spec.decode or spec.pairs < _HEAVY_PAIRS
        small = max(spec.head_dim, spec.head_dim_v) <= _SMALL_HEAD
        own = light or small or (not spec.needs_grad and TRITON.specialised(spec))
        return ("triton", "fa4") if own else ("fa4", "triton")
    if not special and spec.decode and spec.keys >= _SHARED_KEYS:
        read = spec.pairs // spec.groups * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
        if spec.dtype == torch.float32 or (read >= _STEP_BYTES and not spec.needs_grad and TRITON.specialised(spec)):
            return ("triton", "sdpa", "eager")
    if not special and (spec.decode or spec.shape in ("full", "causal")):
        own = spec.shape == "causal" and not spec.needs_grad and _ahead(spec) and TRITON.specialised(spec)
        flash = ("fa3_fwd", "fa4", "fa3") if spec.pairs >= _HEAVY_PAIRS else ()
        return (*flash, *(("triton",) if own else ()), "sdpa", "eager")
    if spec.shape == "ragged" or spec.decode:
        if spec.needs_grad:
            by_runs = ("fa4", "triton", "fa3", "fa2")
            return ("sdpa", *by_runs, "eager") if spec.light_training else (*by_runs, "sdpa", "eager")
        # three narrow heads of a group share their keys in our kernel for Hopper, which then is ahead of flash-attn 3
        three = spec.groups % 3 == 0 and max(spec.head_dim, spec.head_dim_v) <= _SMALL_HEAD
        short = spec.head_dim == _WIDE_HEAD and spec.packed <= _SHORT_DOCUMENTS
        if not (spec.packed and spec.pairs >= _HEAVY_PAIRS) or ((three or short) and TRITON.specialised(spec)):
            return ("triton", "fa3", "fa3_fwd", "fa2", "fa4", "sdpa", "eager")
    return ("fa3_fwd", "fa4", "fa3", "triton", "fa2", "sdpa", "eager")


def _ahead(spec: CallSpec) -> bool:
    if spec.pairs <= min(_LAUNCHED_PAIRS, _LAUNCHED_PER_KEY * spec.keys):
        return True
    small = spec.head_dim <= _SMALL_HEAD
    if spec.keys >= _LONG_KEYS:
        return spec.pairs >= (_LONG_PAIRS_SMALL if small else _LONG_PAIRS)
    return spec.keys >= _MIDDLE_KEYS and not small and spec.pairs <= _MIDDLE_PAIRS
