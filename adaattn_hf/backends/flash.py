"""Attention through the flash-attn package, version 2 or 3, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from ..request import AttentionRequest, AttentionResult, CallSpec

__all__ = ["FlashBackend"]

_MODULES = {"fa2": "flash_attn", "fa3": "flash_attn_interface"}
_PACKAGES = {"fa2": "flash-attn", "fa3": "flash-attn 3 (the module flash_attn_interface)"}


class FlashBackend:
    """flash-attn's dense and variable-length kernels (CUDA, half precision)."""

    def __init__(self, name: str) -> None:
        """`name` is `fa2` or `fa3`."""
        self.name = name
        self._module: Any = None

    def missing(self) -> tuple[str, ...]:
        """The package is found without being imported."""
        if importlib.util.find_spec(_MODULES[self.name]) is None:
            return (f"{_PACKAGES[self.name]} is not installed",)
        return ()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """What flash-attn's kernels cannot compute."""
        reasons = []
        if spec.device != "cuda":
            reasons.append(f"flash-attn runs on CUDA, got {spec.device} tensors")
        if spec.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"flash-attn computes in float16 or bfloat16, got {spec.dtype}")
        if max(spec.head_dim, spec.head_dim_v) > 256:
            reasons.append(f"flash-attn serves head sizes up to 256, got {max(spec.head_dim, spec.head_dim_v)}")
        if spec.head_dim % 8 or spec.head_dim_v % 8:
            reasons.append(f"flash-attn wants head sizes that are multiples of 8, got {spec.head_dim}")
        if spec.head_dim != spec.head_dim_v and self.name == "fa2":
            reasons.append("flash-attn 2 wants equal head sizes of keys and values")
        if spec.bias:
            reasons.append("flash-attn takes no additive bias")
        if spec.sink_logits:
            reasons.append("flash-attn takes no learned sinks")
        if spec.kind == "irregular":
            reasons.append("flash-attn takes no dense mask")
        if spec.dropout and self.name == "fa3":
            reasons.append("flash-attn 3 has no dropout")
        if spec.compiling and spec.kind == "ragged":
            reasons.append("the segments of a padded batch cannot be read while a graph is traced")
        return tuple(reasons)

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """One dense call, or one variable-length call over the segments."""
        raise NotImplementedError
