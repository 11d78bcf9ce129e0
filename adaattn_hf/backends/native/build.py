"""Compiles the native library with whatever C++ compiler there is; never raises for want of one.

Uses the standard library alone, so that the package's build can load this file before anything is installed. To build
(again) in an installed package: `python -m adaattn_hf.backends.native`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "libadaattn.so"
REPORT = "build_report.json"
SOURCES = Path(__file__).parent / "src"
# no -march=native (wheels travel) and no -ffast-math (infinities and NaN have a meaning here)
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-exceptions", "-fno-rtti",
    "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi",
]  # fmt: skip
GCC_FLAGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-ignored-attributes"]  # its own AVX-512 headers
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]


def levels(machine: str) -> dict[str, list[str]]:
    """Instruction sets to compile for, with the compiler flags of each."""
    if machine in ("x86_64", "amd64"):
        bf16 = [*_AVX512, "-mavx512bf16", "-mavx512vnni"]
        amx = [*bf16, "-mamx-tile", "-mamx-bf16"]
        return {"portable": [], "avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": bf16, "amx": amx}
    if machine in ("aarch64", "arm64"):
        return {"portable": [], "neon": []}
    return {"portable": []}


def compiler() -> list[str] | None:
    """The command of the C++ compiler: `$CXX` if set, else the first of c++, g++, clang++ that exists."""
    named = os.environ.get("CXX", "")
    if named:
        command = shlex.split(named)
        return command if shutil.which(command[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def build(target: Path, extra: Sequence[str] = ()) -> dict[str, object]:
    """Compiles the library into `target`; reports `built`, `reason` (why not), `compiler` and the `levels` it has."""
    target.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {"built": False, "reason": "", "compiler": "", "levels": []}
    if sys.platform not in ("linux", "darwin"):
        report["reason"] = f"no build for the platform {sys.platform!r}; Linux and macOS have one"
    elif (command := compiler()) is None:  # a system that has no build is not asked for one
        named = os.environ.get("CXX")
        where = f"CXX={named!r} names none" if named else "none of c++, g++ and clang++ was found"
        report["reason"] = f"no C++ compiler ({where}); install one and run `python -m adaattn_hf.backends.native`"
    else:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
        report["compiler"] = done.stdout.splitlines()[0] if done.stdout else " ".join(command)
        _compile(command, target, list(extra), report)
    if not report["built"]:
        (target / NAME).unlink(missing_ok=True)
    fresh = target / f"{REPORT}.{os.getpid()}"
    fresh.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, target / REPORT)
    return report


def _compile(command: list[str], target: Path, extra: list[str], report: dict[str, object]) -> None:
    """Every level as an object of its own; a level that this compiler does not know is left out."""
    base = [*command, *FLAGS, *extra]
    if "clang" not in str(report["compiler"]):
        base += GCC_FLAGS
    kernels, dispatch = str(SOURCES / "kernels.cpp"), str(SOURCES / "dispatch.cpp")
    targets = levels(platform.machine().lower())

    def run(arguments: list[str]) -> str:
        done = subprocess.run([*base, *arguments], capture_output=True, text=True, check=False)  # noqa: S603
        return "" if done.returncode == 0 else (done.stderr or f"exit status {done.returncode}")

    with tempfile.TemporaryDirectory() as scratch:
        objects = {name: str(Path(scratch) / f"{name}.o") for name in (*targets, "dispatch")}

        def compile_level(name: str) -> str:
            names = [f"-DADA_NS=ada_{name}", f"-DADA_TABLE=ada_kernels_{name}", "-c", kernels]
            return run([*(["-c", dispatch] if name == "dispatch" else targets[name] + names), "-o", objects[name]])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            errors = dict(zip(objects, pool.map(compile_level, objects), strict=True))
        for name in ("dispatch", "portable"):
            if errors[name]:
                report["reason"] = f"the compiler failed on {name}: {errors[name][-600:]}"
                return
        for name in targets:
            if errors[name]:
                run([f"-DADA_TABLE=ada_kernels_{name}", "-DADA_ABSENT", "-c", kernels, "-o", objects[name]])
        fresh = target / f"{NAME}.{os.getpid()}"
        failed = run(["-shared", "-pthread", *objects.values(), "-o", str(fresh)])
        if failed:
            fresh.unlink(missing_ok=True)
            report["reason"] = f"the linker failed: {failed[-600:]}"
            return
        os.replace(fresh, target / NAME)
        report["built"], report["levels"] = True, [name for name in targets if not errors[name]]


def main() -> int:
    """Builds in place and prints the report."""
    report = build(Path(__file__).parent)
    print(json.dumps(report, indent=1))
    return 0 if report["built"] else 1
