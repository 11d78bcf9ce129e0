"""Opens the compiled C++ library at the first call that needs it, and says in words why there is none."""

import ctypes
import json
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import from_environment

NAME = "libadaattn.so"
REPORT = "build_report.json"
"""Files that the build writes; `build.py`, which no call needs, names them again for itself."""

ABI_VERSION = 5
LAYOUT = struct.Struct("=3q7q16q")
VISIBLE = struct.Struct("=Q5qQ4q")
HEADS = struct.Struct("=q2Q")
SCORES = struct.Struct("=d2Q5q")
STORED = struct.Struct("=2Q7qQqQq")
"""The rules of a call: what a structure lets queries see; precision and windows of its key/value heads; what changes
scores; what turns stored keys and values into numbers."""
BACKWARD = struct.Struct("=Q4q3Q12qQ4q")
CALL = struct.Struct(f"=5Q{LAYOUT.size}sd2q{VISIBLE.size + HEADS.size + SCORES.size + STORED.size}s{BACKWARD.size}s")
"""The argument structure, and the parts that are packed by themselves: dtypes, extents and strides; the rules of a
call; what the backward adds."""
STORE = struct.Struct("=4Q3q4q4q4q3q2qQ")
"""The argument structure of `ada_store`."""
SIZES = (CALL.size, STORE.size)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
"""Dtypes by their number in the C interface."""

LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "neon", "amx")
"""Instruction sets by their number in the C interface."""

FUNCTIONS = (
    "abi_version", "args_size", "store_size", "best_level", "has_level", "peak_bytes", "set_parallel", "forward",
    "backward", "store",
)  # fmt: skip
"""What the library exports, each with `ada_` before it."""

LEVEL_VARIABLE = "ADAATTN_NATIVE_LEVEL"


@dataclass(frozen=True)
class Library:
    """The loaded library.

    Attributes:
        handle: The `ctypes` handle; its functions release the GIL.
        forward: `ada_forward` of the handle.
        path: Where it was loaded from.
        level: Number of the instruction set that calls use, see `LEVELS`.
        levels: Names of those that it holds kernels for and this machine has.
        threads: Why it is or is not parallel, in words.
    """

    handle: ctypes.CDLL
    forward: Callable[[bytes], int]
    path: Path
    level: int
    levels: tuple[str, ...]
    threads: str

    @property
    def level_name(self) -> str:
        """Name of the instruction set that calls use."""
        return LEVELS[self.level]


def load(directory: Path) -> Library | str:
    """The library that lies in a directory, or the reason why it cannot be used.

    UsageError: ADAATTN_NATIVE_LEVEL names an instruction set that is none, or none of this machine.
    """
    from_environment(LEVEL_VARIABLE, LEVELS, "")  # what is no name anywhere is said without a library, too
    path = directory / NAME
    if not path.is_file():
        rebuild = "run `python -m adaattn_hf.backends.native`"
        try:
            report = json.loads((directory / REPORT).read_text(encoding="utf-8"))
            reason = report.get("reason") if isinstance(report, dict) else ""
        except FileNotFoundError:
            reason = f"it was never built here; {rebuild}"
        except (OSError, ValueError) as error:
            reason = f"the report of its build cannot be read ({error}); {rebuild}"
        reason = reason or f"the report of its build says nothing; {rebuild}"
        return f"the native library {NAME} is not installed: {reason}"
    try:
        if _is_cut_off(path):
            return f"the native library {path} ends before its own table of sections; reinstall adaattn-hf"
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native library cannot be loaded: {error}; reinstall adaattn-hf on this machine"
    try:
        for function in FUNCTIONS:
            getattr(handle, f"ada_{function}").restype = ctypes.c_int64
    except AttributeError as error:
        return f"the native library lacks a function of its interface ({error}); reinstall adaattn-hf"
    handle.ada_has_level.argtypes = handle.ada_peak_bytes.argtypes = [ctypes.c_int64]
    handle.ada_set_parallel.restype = None
    handle.ada_set_parallel.argtypes = [ctypes.c_void_p]
    handle.ada_forward.argtypes = handle.ada_backward.argtypes = handle.ada_store.argtypes = [ctypes.c_char_p]
    version, sizes = handle.ada_abi_version(), (handle.ada_args_size(), handle.ada_store_size())
    if (version, sizes) != (ABI_VERSION, SIZES):
        return (
            f"the native library speaks interface {version} with {sizes} bytes of arguments, this package speaks "
            f"{ABI_VERSION} with {SIZES}; reinstall adaattn-hf"
        )
    best = int(handle.ada_best_level())
    if not 0 <= best < len(LEVELS):
        return f"the native library names instruction set {best}, expected 0 to {len(LEVELS) - 1}; reinstall adaattn-hf"
    runnable = tuple(name for number, name in enumerate(LEVELS) if handle.ada_has_level(number))
    level = LEVELS.index(from_environment(LEVEL_VARIABLE, runnable, LEVELS[best]))
    return Library(handle, handle.ada_forward, path, level, runnable, _share_threads(handle))


def _is_cut_off(path: Path) -> bool:
    """Whether a 64-bit ELF file is shorter than its section table says: opening one like that kills the process."""
    with path.open("rb") as file:
        header = file.read(64)
        if not header.startswith(b"\x7fELF"):
            return False  # another format, or none: the loader will say
        if len(header) < 64:
            return True
        (table,) = struct.unpack_from("<Q", header, 40)
        entry_size, entries = struct.unpack_from("<2H", header, 58)
        return file.seek(0, os.SEEK_END) < int(table + entry_size * entries)


def _share_threads(handle: ctypes.CDLL) -> str:
    """Hands over torch's own OpenMP parallel loop: looked up through torch's library it is never a second runtime."""
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


_opened: Library | str | None = None  # None until it was looked for; a text says why there is none


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def missing() -> tuple[str, ...]:
    """All that stands in the way of the native kernels here; empty if nothing does."""
    global _opened
    if _opened is None:
        _opened = load(Path(__file__).parent)
    return (_opened,) if isinstance(_opened, str) else ()


def library() -> Library | None:
    """The loaded library, or None; `missing` says why."""
    return None if missing() or not isinstance(_opened, Library) else _opened


def loaded() -> Library:
    """The loaded library. Raises RuntimeError where there is none; the error says why."""
    native = library()
    if native is None:
        raise RuntimeError(f"native backend: {'; '.join(missing())}")
    return native


def level_here() -> str:
    """Name of the instruction set that calls use on this machine, `none` without the library."""
    native = library()
    return "none" if native is None else native.level_name


def level_names() -> tuple[str, ...]:
    """Instruction sets that can run on this machine; empty without a library."""
    native = library()
    return () if native is None else native.levels


def reset_peak() -> None:
    """Begins a new count of `peak_bytes`; without a library there is nothing to count."""
    if (native := library()) is not None:
        native.handle.ada_peak_bytes(1)


def peak_bytes() -> int:
    """Returns the most bytes that native calls worked with at a time since `reset_peak`; torch cannot see them.

    These are packed keys and values, tables and scratch, in the sizes that the calls asked for; a thread keeps such
    buffers between calls, which counts where a call uses them.
    """
    native = library()
    return 0 if native is None else int(native.handle.ada_peak_bytes(0))
