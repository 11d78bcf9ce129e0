"""One hash of weights, which every entry of every tensor enters: plans and saved caches are bound to it.

A tensor enters with the sums of its bits along rows and along columns. Sums of integers are exact in any order, so
that devices, numbers of threads and sizes of pieces agree, and weights are read once, where they lie.
"""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.plans.plan import WHOLE
from adaattn_hf.plans.record import PlanError

from .parts import pieces, saved_weights

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ENTRIES = 1 << 20
"""Integers that are added at a time: as many as a cache holds."""
_NARROW, _COLUMNS = 64, 4096
"""Tensors of fewer columns are read as rows of up to so many entries, or sums would be as large as they are."""


def weight_hash(module: nn.Module) -> str:
    """Returns a hash of what a module saves: names, shapes, dtypes and all entries of its parameters and buffers.

    Wrappers are looked through. PlanError: a weight has no data, or is of a kind that cannot be read.
    """
    return _hash(saved_weights(module))


def model_hash(model: nn.Module, each: dict[str, str] | None = None) -> str:
    """Returns a hash of all weights of a model but its head and pooler, which differ between the classes of a model.

    `each` is given the hash of each weight by its name, in the order of the model.
    """
    weights = saved_weights(base_of(model))
    named = {name: weight for name, weight in weights.items() if not name.startswith("pooler.")}
    if each is not None:
        each |= dict.fromkeys(named, "")
    return WHOLE + _hash(named, each)


def base_of(model: nn.Module) -> nn.Module:
    """Returns the part of a model whose weights its plan is bound to: all of it but its head."""
    # the Transformers model inside whatever wraps it, such as PEFT's; the module itself if there is none
    inner = next((part for part in model.modules() if hasattr(type(part), "base_model_prefix")), model)
    prefix = getattr(inner, "base_model_prefix", "")
    base = getattr(inner, prefix, inner) if prefix else inner
    return base if isinstance(base, nn.Module) else inner


def tensor_hash(tensor: Tensor) -> str:
    """Returns a hash of one tensor."""
    return _hash({"": tensor})


def _hash(weights: dict[str, Any], each: dict[str, str] | None = None) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        content = b"".join(_contents(name, value))
        digest.update(f"{name} ".encode() + content)
        if each is not None:
            each[name] = hashlib.sha256(content).hexdigest()
    return digest.hexdigest()


def _contents(name: str, value: Any) -> list[bytes]:
    if isinstance(value, Tensor):
        # sharded ones are gathered first
        gathered: Any = value.detach()
        whole = gathered.full_tensor() if hasattr(gathered, "full_tensor") else gathered
        return [content for piece in pieces(whole) for content in _of_tensor(piece)]
    if isinstance(value, (list, tuple)):
        return [content for item in value for content in _contents(name, item)]
    if isinstance(value, (bool, int, float, str, bytes, torch.dtype, type(None))):
        return [repr(value).encode()]
    raise PlanError(
        f"{name} is saved as {type(value).__name__}, expected a tensor or plain values; a plan cannot be bound to it, "
        "so leave that layer out of quantisation"
    )


def _of_tensor(tensor: Tensor) -> list[bytes]:
    about = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if not tensor.numel():
        return [about]
    columns = tensor.shape[-1] if tensor.ndim > 1 else 1
    if columns < _NARROW:
        columns = math.gcd(tensor.numel(), _COLUMNS)
    width = math.gcd(columns * tensor.element_size(), 4)
    lanes = columns * tensor.element_size() // width
    rows: list[Tensor] = []
    below: Tensor | int = 0
    for chunk in tensor.reshape(-1, columns).split(max(1, _ENTRIES // lanes)):
        chunk = chunk.contiguous()
        if chunk.storage_offset() * chunk.element_size() % width:
            chunk = chunk.clone()
        # sums are memory of their own: what numpy has seen cannot be freed, as FSDP does with gathered weights
        bits = chunk.view(_INTEGERS[width]).long()
        rows.append(bits.sum(1))
        below = below + bits.sum(0)
    assert isinstance(below, Tensor)
    return [about, *(sums.cpu().numpy().tobytes() for sums in (torch.cat(rows), below))]
