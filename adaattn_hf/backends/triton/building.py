"""Whether Triton can build what launches its kernels on a GPU: it takes a C compiler and Python's headers for it."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from pathlib import Path


@functools.cache
def cannot_build() -> tuple[str, ...]:
    """What Triton lacks for the C that it compiles before its first launch on this machine; empty if nothing.

    Found out without importing it, as it looks itself (`triton/runtime/build.py`); on Windows it brings a compiler.
    """
    if os.name == "nt":
        return ()
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    reasons = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        reasons.append("triton finds no C compiler, which it needs to launch kernels: install gcc, or set CC")
    if not header.is_file():
        reasons.append(f"triton needs Python's headers to launch kernels: no {header} (package python3-dev)")
    return tuple(reasons)
