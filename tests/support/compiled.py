"""Compiles the Triton kernels that calls launch for a device that is not here: `python -m tests.support.compiled SM …`.

One line per kernel: its name, and the bytes of shared memory that it takes.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.launcher import _OPTIONS as FUSED
from adaattn_hf.backends.triton import bulk, hopper, launch, shapes, step, training
from adaattn_hf.calibration.over_codes import over_codes

NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")


class Compiled:
    """Stands for a kernel, and compiles it where it would be launched."""

    def __init__(self, kernel: Any, capability: int) -> None:
        """From what `triton.jit` returned, and a compute capability, 90 say."""
        self.kernel = getattr(kernel, "_kernel", kernel)
        self.capability = capability

    def __call__(
        self, _grid: Any, arguments: Sequence[Any], constants: Mapping[str, Any], _kind: Any
    ) -> None:
        """As a `Launcher` is called."""
        names = self.kernel.arg_names
        signature: dict[str, str] = {}
        fixed: dict[tuple[int, ...], Any] = {}
        facts: dict[tuple[int, ...], Any] = {}
        for place, (name, one) in enumerate(zip(names, arguments, strict=False)):
            signature[name] = _type(one)
            # as Triton tells variants apart when it launches
            if isinstance(one, Tensor) or (type(one) is int and one % 16 == 0):
                facts[(place,)] = [["tt.divisibility", 16]]
        for name, value in constants.items():
            if name in names:
                signature[name], fixed[(names.index(name),)] = "constexpr", value
        behind = set(names[len(arguments) :])
        if not behind <= set(constants):  # a launch without Triton passes them by their place
            raise TypeError(f"{self.kernel.__name__}: {sorted(behind - set(constants))} are no constants")
        options = {name: constants[name] for name in OPTIONS if constants.get(name) is not None} | FUSED
        source_of = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        source = source_of(self.kernel, signature, fixed, facts)
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        sys.stdout.write(f"{self.kernel.__name__} {made.metadata.shared}\n")


def _type(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"*{NAMES[argument.dtype]}"
    if isinstance(argument, (TensorDescriptor, GluonDescriptor)):
        layout = f",{argument.layout!r}" if isinstance(argument, GluonDescriptor) else ""
        return f"tensordesc<{NAMES[argument.base.dtype]}{list(argument.block_shape)}{layout}>"
    return "fp32" if isinstance(argument, float) else "i32"


def replace_kernels(capability: int) -> None:
    """Puts a `Compiled` in the place of every kernel that is launched."""
    modules: tuple[ModuleType, ...] = (shapes, step, training)
    for module in modules:
        for name, one in list(vars(module).items()):
            if isinstance(one, triton.runtime.JITFunction) or hasattr(one, "_kernel"):
                setattr(module, name, Compiled(one, capability))
    vars(shapes)["_LEAST_PRODUCTS"] = 0
    vars(bulk)["_copies_tiles"] = lambda device: capability >= 90
    vars(hopper)["usable"] = lambda device: capability == 90
    vars(hopper)["_LEAST_OF_WINDOWS"] = 0
    vars(hopper)["multiprocessors"] = lambda device: 132
    name = "launch_specialised"
    vars(hopper)[name] = functools.partial(Compiled, vars(hopper)[name]()._kernel, capability)


def call(
    queries: int,
    keys: int,
    rules: HeadRules | None = None,
    grad: bool = False,
    dim: int = 64,
    document: int | None = None,
) -> AttentionRequest:
    """A call of 8 heads over 2 key/value heads in bfloat16, of documents of so many tokens."""
    query, key, value = (
        torch.randn(1, count, heads, dim, dtype=torch.bfloat16).transpose(1, 2).requires_grad_(grad)
        for count, heads in ((queries, 8), (keys, 2), (keys, 2))
    )
    structure = CallStructure(1, queries, keys, causal=True, q_offset=keys - queries)
    if document is not None:
        numbers = (torch.arange(keys) // document)[None]
        structure = CallStructure(1, queries, keys, causal=True, q_segments=numbers, k_segments=numbers)
    return AttentionRequest(query, key, value, structure, 0.125, per_head=rules)


def main(capability: int) -> None:
    """Compiles what steps, prefill, training and caches of codes launch."""
    replace_kernels(capability)
    windows = HeadRules((128, 0), (16, 0), ("model", "model"))
    for request in (call(1, 512), call(1, 512, windows), call(256, 256)):
        launch.attend(request)
    # of a graph, whose offset and padding the kernel reads
    graph = call(1, 512)
    length, real = torch.tensor(300), torch.ones(1, 512, dtype=torch.bool)
    graph.structure = graph.structure.with_changes(q_offset=length, key_padding=real)
    for pairs in (None, ((128, 16), (1 << 30, 0))):
        step.attend_step(graph, graph=True, windows=pairs, until=None if pairs is None else 256)
    for rules in (None, windows):
        launch.attend(call(256, 256, rules, dim=128))
    for rules, dim in itertools.product((None, windows), (64, 128)):  # documents end within tiles
        launch.attend(call(600, 600, rules, dim=dim, document=200))
    for dim in (32, 96):  # head sizes that no device has kernels of its own for
        launch.attend(call(256, 256, windows, dim=dim))
    trained = call(256, 256, windows, grad=True)
    launch.attend(trained).out.sum().backward()
    for stored in ("int8", "k8v4"):
        launch.attend(over_codes(call(1, 512), stored))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(int(argument))
