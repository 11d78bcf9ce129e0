"""Finds and loads the compiled library, and says in words why there is none."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .build import NAME, REPORT

__all__ = ["LEVELS", "Library", "level_names", "library", "load", "missing"]

ABI_VERSION = 2
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "neon")
"""Instruction sets by their number in the C interface."""

LEVEL_VARIABLE = "ADAATTN_NATIVE_LEVEL"


@dataclass(frozen=True)
class Library:
    """The loaded library.

    Attributes:
        handle: The `ctypes` handle; its functions release the GIL.
        forward: `ada_forward` of the handle.
        path: Where it was loaded from.
        level: Number of the instruction set that calls use, see `LEVELS`.
        threads: Why it is or is not parallel, in words.
    """

    handle: ctypes.CDLL
    forward: Callable[[bytes], int]
    path: Path
    level: int
    threads: str

    @property
    def level_name(self) -> str:
        """Name of the instruction set that calls use."""
        return LEVELS[self.level]

    def has_level(self, name: str) -> bool:
        """Whether the library holds kernels for an instruction set that this machine has."""
        return bool(self.handle.ada_has_level(LEVELS.index(name)))


def load(directory: Path) -> tuple[Library | None, tuple[str, ...]]:
    """The library that lies in a directory, or None with all the reasons why it cannot be used."""
    path = directory / NAME
    if not path.is_file():
        return None, (f"the native library {NAME} is not installed: {_why_not_built(directory)}",)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return None, (f"the native library cannot be loaded: {error}; reinstall adaattn-hf on this machine",)
    for function in ("abi_version", "args_size", "best_level", "has_level", "forward", "backward"):
        getattr(handle, f"ada_{function}").restype = ctypes.c_int64
    handle.ada_has_level.argtypes = [ctypes.c_int64]
    handle.ada_set_parallel.restype = None
    handle.ada_set_parallel.argtypes = [ctypes.c_void_p]
    handle.ada_forward.argtypes = [ctypes.c_char_p]
    handle.ada_backward.argtypes = [ctypes.c_char_p]
    version = handle.ada_abi_version()
    if version != ABI_VERSION:
        return None, (
            f"the native library speaks interface {version}, this package speaks {ABI_VERSION}; reinstall adaattn-hf",
        )
    level = int(handle.ada_best_level())
    asked = os.environ.get(LEVEL_VARIABLE, "")
    if asked:
        known = [name for number, name in enumerate(LEVELS) if handle.ada_has_level(number)]
        if asked not in known:
            return None, (
                f"{LEVEL_VARIABLE} is {asked!r}, expected one of {', '.join(known)} on this machine",
            )
        level = LEVELS.index(asked)
    return Library(handle, handle.ada_forward, path, level, _share_threads(handle)), ()


def _share_threads(handle: ctypes.CDLL) -> str:
    """Hands the library the parallel loop of the OpenMP runtime that torch itself is linked to.

    Looking the symbol up through torch's own library finds that very runtime and can never load a second one.
    """
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    torch_cpu = Path(torch.__file__).parent / "lib" / f"libtorch_cpu{suffix}"
    if not torch_cpu.is_file():
        return f"one thread: {torch_cpu.name} was not found beside torch"
    try:
        function = ctypes.CDLL(str(torch_cpu)).GOMP_parallel
    except (OSError, AttributeError) as error:
        return f"one thread: torch has no OpenMP runtime to share ({error})"
    handle.ada_set_parallel(ctypes.cast(function, ctypes.c_void_p))
    return "threads of the OpenMP runtime that torch has loaded"


def _why_not_built(directory: Path) -> str:
    report = directory / REPORT
    if report.is_file():
        return str(json.loads(report.read_text(encoding="utf-8"))["reason"])
    return "it was never built here; run `python -m adaattn_hf.backends.native`"


# Loaded with this module, which the backend imports at its first use: a traced graph then finds plain values here.
_LOADED, _MISSING = load(Path(__file__).parent)


def library() -> Library | None:
    """The loaded library, or None; `missing` says why."""
    return _LOADED


def missing() -> tuple[str, ...]:
    """All that stands in the way of the native kernels here; empty if nothing does."""
    return _MISSING


def level_names() -> tuple[str, ...]:
    """Instruction sets that can run on this machine; empty without a library."""
    return tuple(name for name in LEVELS if _LOADED is not None and _LOADED.has_level(name))
