"""What launches of kernels share: facts of devices, descriptors of tensors, and a launch without Triton's look."""

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..base import installed
from ..capability import capability, of_sm
from .tiling import LEAST_SM, padded

_HOPPER = (9, 0)
_TRIED = (3, 6)
"""The first version of Triton whose Gluon and whose compiled kernels were tried here; the kernels of older ones are
launched by other arguments, which leave constants out."""
_BYTES = 16
"""Triton compiles a variant for tensors whose addresses are multiples of this, as it reads whole vectors then."""
_MOST = 256
"""Most variants of a kernel that are kept."""
_OPTIONS = {"enable_fp_fusion": True}
"""Of the compiler, for every kernel: a product and a sum in one instruction; from Triton 3.10 on it is an option."""


def _tried() -> bool:
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= _TRIED


class DeviceFacts(NamedTuple):
    """What launches ask of a device.

    Attributes:
        compiles: Whether it has the matrix units that kernels are compiled for.
        memory: Bytes of shared memory that a program may have.
        processors: Multiprocessors.
        tma: Whether it copies whole tiles by descriptors, and Triton has them.
        specialised: Whether it runs the kernel for Hopper, which needs TMA, products of four warps and Gluon.
    """

    compiles: bool
    memory: int
    processors: int
    tma: bool
    specialised: bool


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of a device, asked of it once. Where kernels are interpreted they are those of a small Hopper."""
    on_cuda = device.type == "cuda"
    facts = capability(device) if on_cuda else of_sm(_HOPPER)
    return DeviceFacts(
        compiles=facts is None or facts.sm >= LEAST_SM,
        memory=(facts or of_sm(_HOPPER)).shared_memory,
        processors=torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4,
        tma=facts is not None and facts.tiles and installed("triton.tools.tensor_descriptor"),
        specialised=on_cuda
        and facts is not None
        and facts.sm == _HOPPER
        and _tried()
        and installed("triton.experimental.gluon"),
    )


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all tensors begin at addresses for which Triton compiles the same variant."""
    together = 0
    for tensor in tensors:
        if tensor is not None:
            together |= tensor.data_ptr()
    return together % _BYTES == 0


def descriptor_of(tensor: Tensor, rows: int, columns: int | None = None, gluon: bool = False) -> Any:
    """A TMA descriptor of tiles `[1, 1, rows, columns]` of a tensor `[a, b, c, d]`, None where TMA cannot take it.

    Tiles have all columns when none are given. `gluon`: a kernel in Gluon reads it.
    """
    width, size, strides = tensor.shape[3], tensor.element_size(), tensor.stride()
    if size != 2 or width != padded(width) or width < 32 or not aligned(tensor) or not device_facts(tensor.device).tma:
        return None
    if strides[3] != 1 or any(s * size % _BYTES or not s for s in strides[:3]):
        return None
    place = tensor, list(tensor.shape), list(strides), [1, 1, rows, columns or width]
    if gluon:
        from .warps import DESCRIPTOR, TILE

        return DESCRIPTOR(*place, TILE)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(*place)


class Launcher:
    """A Triton kernel and its compiled variants, by what they depend on: it stands above `triton.jit` as a decorator.

    Triton finds the variant of a launch by a look at every argument, of which these kernels have up to fifty, and the
    host takes longer over that than a device over a short step. A launch whose kind was launched before takes the
    compiled variant as it is. This is the only place that keeps any.
    """

    def __init__(self, kernel: Any) -> None:
        """From what `triton.jit` returned."""
        self._kernel = kernel
        self._variants: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        # on AMD devices variants also depend on how large a tensor is
        self._keeps = _tried() and torch.version.hip is None

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
                then Triton looks for itself, as it does where it interprets.
        """
        device = arguments[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, arguments, constants, kind)
            return
        if kind is None or device < 0 or not self._keeps:
            self._kernel[grid](*arguments, **constants, **_OPTIONS)
            return
        key = kind, device, *constants.values()
        variant = self._variants.get(key)
        if variant is not None:
            compiled, rest = variant
            compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
            return
        compiled = self._kernel[grid](*arguments, **constants, **_OPTIONS)
        if len(self._variants) >= _MOST:
            self._variants.clear()
        names = self._kernel.arg_names[len(arguments) :]
        self._variants[key] = compiled, tuple(constants[name] for name in names)
