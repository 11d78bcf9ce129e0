"""Whether the Triton kernels of all calls fit each device: `make compiled` compiles them and fails where one does not.

Kernels are compiled for devices that are not here, with the constants and in the variant that a launch would ask
for. A call that the backend refuses on a device is not compiled for it. Shared memory is known before machine code is
made, so none is.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.pages import Pages
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import capability
from adaattn_hf.backends.capability import of_sm
from adaattn_hf.backends.triton import TritonBackend, backward, forward, step, storing, tiling
from adaattn_hf.backends.triton import launch as launching
from adaattn_hf.backends.triton.ops import traced_step
from adaattn_hf.eval.arms import over_codes

TRITON = TritonBackend()
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
WINDOWS = HeadRules((128, 0), (16, 0), ("model",) * 2)
KINDS = ("plain", "padded", "packed", "windowed", "full")
"""Structures of a call."""
DEVICES = (80, 86, 89, 90, 100, 120)
"""Compute capabilities: A100 and A30; RTX 30, A10 and A40; RTX 40, L4 and L40; H100 and H200; B200; RTX 50."""


@dataclass(frozen=True)
class Launch:
    """A kernel as one call launches it."""

    sm: int  # compute capability that it was compiled for, 90 for 9.0
    call: str  # in words
    kernel: str
    tile: str  # query rows, key columns, warps and stages; of a step, no rows
    shared: int  # bytes of shared memory of a program
    limit: int  # bytes that the device has for one


class NoDevice:
    """Stands for Triton's driver: all that it knows of a device is what to compile for."""

    def __init__(self, sm: int) -> None:
        """For a compute capability."""
        self.sm = sm

    def get_current_device(self) -> int:
        """A number of its own for each compute capability, by which Triton keeps what it compiled."""
        return self.sm

    def get_current_stream(self, device: int) -> int:
        """None is used."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return GPUTarget("cuda", self.sm, 32)


def on(sm: int, believed: int | None = None) -> list[Launch]:
    """Notes launches in a list from now on, compiled for a device; the backend believes that it is another one."""
    facts, found, shared = of_sm(divmod(believed or sm, 10)), list[Launch](), of_sm(divmod(sm, 10)).shared_memory
    driver.set_active(NoDevice(sm))
    vars(capability)["_sm"] = lambda index: believed or sm
    torch.cuda.current_device = lambda: 0
    # tensors are a processor's here
    assumed = launching.DeviceFacts(True, facts.shared_memory, 132, facts.tiles, facts.sm == (9, 0))
    for module in (launching, forward, backward, step):
        vars(module)["device_facts"] = lambda device: assumed
    # calls are small here, and large ones shall be shown
    vars(forward)["_LEAST_PRODUCTS"] = vars(tiling)["_LEAST_OF_WINDOWS"] = vars(tiling)["_LEAST_OF_ROWS"] = 0
    # apart from kernels that are launched, of which Triton 3.6 cannot tell these
    triton.knobs.cache.dir = str(Path("build", "compiled").resolve())
    triton.knobs.runtime.add_stages_inspection_hook = _without_machine_code

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        made = _RUN(kernel, *arguments, grid=grid, warmup=True, **constants)
        tile = [constants.get(name) for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]
        shown = "/".join("-" if one is None else str(one) for one in tile)
        found.append(Launch(sm, "", kernel.__name__, shown, made.metadata.shared, shared))
        return made

    JITFunction.run = run
    return found


_RUN = JITFunction.run


def _without_machine_code(*asked: Any, **more: Any) -> tuple[str, str] | None:
    """Triton's hook: tells such kernels from others, and leaves out the stages behind the one that lays memory out."""
    if not asked and not more:
        return "compiled", "compiled"
    stages: Any = more.get("stages", asked[1] if len(asked) > 1 else None)

    def named(source: Any, metadata: dict[str, Any]) -> str:
        metadata["name"] = "none"
        return ""

    stages.update(ptx=named, cubin=lambda source, metadata: b"")
    return None


def attention_call(
    dims: tuple[int, int],
    queries: int,
    keys: int = 600,
    heads: int = 4,
    rules: HeadRules | None = None,
    grad: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "plain",
    **more: Any,
) -> AttentionCall:
    """A call over two key/value heads, of one of KINDS; `dims` are channels of queries and keys, and of values."""
    query, key, value = (
        torch.randn(1, count, number, dim, dtype=dtype).transpose(1, 2).requires_grad_(grad)
        for count, number, dim in ((queries, heads, dims[0]), (keys, 2, dims[0]), (keys, 2, dims[1]))
    )
    asked: dict[str, Any] = {"causal": kind != "full", "q_offset": 0 if kind == "full" else keys - queries}
    if kind == "packed":
        numbers = (torch.arange(keys) // 200)[None]
        asked = {"causal": True, "q_segments": numbers, "k_segments": numbers}
    elif kind == "padded":
        asked |= {"key_padding": torch.arange(keys)[None] >= 70}
    elif kind == "windowed":
        asked |= {"window": 128}
    structure = MaskStructure(1, queries, keys, **asked)
    return AttentionCall(query, key, value, structure, dims[0] ** -0.5, per_head=rules, **more)


def attend(asked: AttentionCall) -> AttentionResult:
    """Attention by the kernel of the request's kind."""
    return TRITON.kernel(asked.checked_kind(), asked.per_head)(asked)


Call = tuple[str, Callable[[], AttentionCall], Callable[[AttentionCall], Any]]
"""A call in words, what makes its request, and what computes it."""


def both_passes(asked: AttentionCall) -> None:
    """Attention and its gradients, that of the log-sum-exp included where it is asked for."""
    result = attend(asked)
    (result.out.sum() + (result.lse.sum() if result.lse is not None else 0.0)).backward()


def captured(asked: AttentionCall) -> None:
    """A step of a traced graph, whose kernel reads offset and padding."""
    structure = asked.structure.with_changes(q_offset=torch.tensor(asked.key.shape[2] - 1))
    traced_step(replace(asked, structure=structure, per_head=replace(WINDOWS, until=256)))


def over_pages(asked: AttentionCall) -> None:
    """The same step over pages, without rules and with some."""
    pages = Pages.of(torch.zeros((1, 8)).int(), torch.tensor([0, 1500]).int(), 256, asked.key.shape[2], None)
    for rules in (None, WINDOWS):
        attend(replace(asked, structure=pages, new_tokens=(asked.key[:, :, :1], asked.value[:, :, :1]), per_head=rules))


def rounded(asked: AttentionCall) -> None:
    """Tokens on their way into the cache whose codes a request reads, with all that a kernel can take into account."""
    assert asked.stored is not None
    keys, values = (
        torch.randn(asked.key.shape),
        torch.randn(asked.stored.values(asked.value, torch.float32).shape),
    )
    beside = keys.mean(2).contiguous()
    dtype = asked.query.dtype
    parts = asked.key, asked.stored.key_scale, asked.value, asked.stored.value_scale
    storing.store(keys.to(dtype), values.to(dtype), parts, mean=beside, along=beside)
    held = torch.zeros((), dtype=torch.int64)
    token = keys[:, :, :1].to(dtype), values[:, :, :1].to(dtype)
    storing.store(*token, parts, mean=beside, along=beside, at=held)


def prefills() -> Iterator[Call]:
    """Many queries, without gradients and with them."""
    for dims, kind, rules in itertools.product(DIMS, KINDS, (None, WINDOWS)):
        if rules is not None and kind == "windowed":
            continue
        name = f"{kind}, heads of {dims[0]}" + (", windows per head" if rules else "")
        make = partial(attention_call, dims, 600, rules=rules, kind=kind)
        yield name, make, attend
        yield f"{name}, gradients", partial(make, grad=True), both_passes
    for dims in DIMS:
        make = partial(attention_call, dims, 600, softcap=30.0, need_lse=True)
        yield f"softcap, heads of {dims[0]}", make, attend
        yield f"softcap, heads of {dims[0]}, gradients", partial(make, grad=True), both_passes


def steps() -> Iterator[Call]:
    """One query, over numbers and over codes; up to 71 query heads share keys, as in Falcon."""
    for dims, dtype, heads in itertools.product(DIMS, (torch.bfloat16, torch.float32), (16, 142)):
        words = f"heads of {dims[0]}, {heads // 2} sharing keys, {str(dtype).removeprefix('torch.')}"
        make = partial(attention_call, dims, 1, 1500, heads, dtype=dtype)
        yield f"step, {words}", make, attend
        yield f"step, {words}, windows per head", partial(make, rules=WINDOWS), attend
        yield f"step over pages, {words}", make, over_pages
        yield f"step of a graph, {words}", partial(make, kind="padded", softcap=30.0), captured
        if dims[0] == dims[1] and heads == 16:
            for stored in ("int8", "k8v4"):
                make_codes = partial(_coded, make, stored)
                yield f"step over {stored}, {words}", make_codes, attend
                yield f"step of a graph over {stored}, {words}", make_codes, captured
                yield f"storing {stored}, {words}", make_codes, rounded


def _coded(make: Callable[[], AttentionCall], stored: str) -> AttentionCall:
    """The same over codes."""
    return over_codes(make(), stored)


def calls(asked: Sequence[str]) -> Iterator[Call]:
    """The calls of those names, all where there are none."""
    return (call for call in itertools.chain(prefills(), steps()) if not asked or call[0] in asked)


def refused(asked: AttentionCall) -> tuple[str, ...]:
    """Why the backend would not serve the call on a device."""
    return TRITON.refusals(asked.checked_kind()._replace(device=torch.device("cuda")))


def compiled(sm: int, names: Sequence[str] = (), believed: int | None = None) -> Iterator[Launch]:
    """The launches of calls that the backend serves on a device, all where none is named; what is the same once."""
    found, seen = on(sm, believed), set[Launch]()
    for name, make, work in calls(names):
        asked = make()
        if refused(asked):
            yield Launch(sm, name, "refused", refused(asked)[0], 0, 0)
            continue
        work(asked)
        for one in found:
            if one not in seen:
                seen.add(one)
                yield replace(one, call=name)
        found.clear()


def broken(launches: list[Launch]) -> list[str]:
    """What does not fit the device that it was compiled for."""
    return [
        f"sm_{one.sm}: {one.kernel} {one.tile} takes {one.shared:,} of {one.limit:,} bytes ({one.call})"
        for one in launches
        if one.shared > one.limit
    ]


def main() -> int:
    """Compiles in this process for one device, in others for several; 1 where something does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sm", type=int, nargs="*", default=list(DEVICES), help="compute capabilities, as 86")
    parser.add_argument("--calls", nargs="*", default=[], help="names of calls (default: all)")
    parser.add_argument("--believed", type=int, help="compute capability that the backend holds the device to have")
    parser.add_argument("--lines", action="store_true", help="print each launch as JSON, whether it fits or not")
    asked = parser.parse_args()
    if len(asked.sm) == 1:
        found = list(compiled(asked.sm[0], asked.calls, asked.believed))
    else:
        more = ["--lines", "--calls", *asked.calls]

        def alone(sm: int) -> list[Launch]:
            command = [sys.executable, "-m", __spec__.name, str(sm), *more]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603
            return [Launch(**json.loads(line)) for line in text.splitlines()]

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(itertools.chain.from_iterable(pool.map(alone, asked.sm)))
    if asked.lines:
        sys.stdout.writelines(json.dumps(asdict(one)) + "\n" for one in found)
    wrong = broken(found)
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong and not asked.lines else 0


if __name__ == "__main__":
    sys.exit(main())
