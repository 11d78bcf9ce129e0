"""Launches Triton kernels on the device of their tensors, and again without Triton's look at every argument."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

BYTES = 16
"""Triton compiles a variant for tensors whose addresses are multiples of this, as it reads whole vectors then."""
_TRIED = (3, 6)
"""The first version whose compiled kernels were launched by all their arguments here; old ones left constants out."""
_MOST = 256
"""Most variants of a kernel that are kept."""
_OPTIONS = {"enable_fp_fusion": True}
"""Of the compiler, for every kernel: a product and a sum in one instruction; from Triton 3.10 on it is an option."""


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors begin at addresses for which Triton compiles the same variant."""
    together = 0
    for tensor in tensors:
        if tensor is not None:
            together |= tensor.data_ptr()
    return together % BYTES == 0


class Launcher:
    """A Triton kernel and its compiled variants, by what they depend on."""

    def __init__(self, kernel: Any) -> None:
        """From what `triton.jit` returned."""
        self._kernel = kernel
        self._variants: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        # on AMD devices variants also depend on how large a tensor is
        self._keeps = version >= _TRIED and torch.version.hip is None

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        kind: Hashable | None = None,
    ) -> None:
        """Launches the kernel on the current stream of the device that its first tensor lies on.

        Triton and the driver launch on the current device, which need not be that one: `device_map="auto"` moves a
        layer's inputs and leaves the current device as it is. Whoever calls the layer finds it as it was.

        Args:
            arguments: The kernel's, in its order, up to its constants; the first is a tensor, and all lie there.
            constants: These by name, and the compiler's options.
            kind: What the compiled variant depends on besides them and the device: dtypes and strides of tensors, and
                numbers that Triton may compile in. None where an address is not `aligned` or anything else is unusual:
                then Triton looks for itself.
        """
        device = arguments[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, arguments, constants, kind)
            return
        if kind is None or not self._keeps:
            self._kernel[grid](*arguments, **constants, **_OPTIONS)
            return
        key = kind, device, *constants.values()
        known = self._variants.get(key)
        if known is not None:
            compiled, rest = known
            compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
            return
        compiled = self._kernel[grid](*arguments, **constants, **_OPTIONS)
        if len(self._variants) >= _MOST:
            self._variants.clear()
        names = self._kernel.arg_names[len(arguments) :]
        self._variants[key] = compiled, tuple(constants[name] for name in names)
