"""What a device can do, as one record that backends refuse by, and what the machine is called."""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Capability:
    """Facts of a device.

    Attributes:
        sm: Compute capability of a CUDA device, as `(9, 0)` for Hopper's datacentre devices; `(0, 0)` for a processor.
        bf16: Multiplies bfloat16 without widening it first.
        fp8: Multiplies fp8.
        int8: Multiplies bytes into 32 bits (VNNI on a processor).
        tiles: Loads tiles whole: by TMA on a CUDA device, into the AMX registers of a processor.
        shared_memory: Bytes of it that one program of a CUDA device may have.
    """

    sm: tuple[int, int]
    bf16: bool
    fp8: bool
    int8: bool
    tiles: bool
    shared_memory: int = 0

    def words(self) -> str:
        """What it can do, in words."""
        kinds = {"bf16": self.bf16, "fp8": self.fp8, "int8": self.int8, "whole tiles": self.tiles}
        memory = [f"{self.shared_memory >> 10} KiB of shared memory"] if self.shared_memory else []
        return ", ".join([*(name for name, can in kinds.items() if can), *memory]) or "products in float32 alone"


# Shared memory per thread block, in KiB (CUDA C++ programming guide, table of technical specifications).
_SHARED_KIB = {
    (7, 0): 96, (7, 2): 96, (7, 5): 64,
    (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99,
    (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227, (12, 0): 99, (12, 1): 99,
}  # fmt: skip


def of_sm(sm: tuple[int, int]) -> Capability:
    """The record of a compute capability; one that the table lacks is taken to have the least shared memory, 48 KiB."""
    shared = _SHARED_KIB.get(sm, 48) * 1024
    return Capability(sm, sm >= (8, 0), sm >= (8, 9), sm >= (7, 2), sm >= (9, 0), shared)


def of_level(level: str) -> Capability:
    """The record of an instruction set that the native kernels are compiled for."""
    half = level in ("avx512_bf16", "amx")  # that level is compiled with VNNI, too
    return Capability((0, 0), bf16=half, fp8=False, int8=half, tiles=level == "amx")


@torch.compiler.assume_constant_result
def _sm(index: int | None) -> int:
    """90 for 9.0, 0 for none: one number, as torch 2.11 cannot compare tuples of constants in a traced graph."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(torch.cuda.current_device() if index is None else index)
    return 10 * major + minor


def capability(device: torch.device | int | None = None) -> Capability | None:
    """The record of a CUDA device, by default the current one; None where there is none, or one of another vendor."""
    sm = _sm(device.index if isinstance(device, torch.device) else device)
    return of_sm((sm // 10, sm % 10)) if sm else None


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def driver() -> str:
    """Version of the NVIDIA driver, `unknown` where the system does not say."""
    version = Path("/proc/driver/nvidia/version")
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    number = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return number.group() if number else "unknown"
