"""Builds the kernels and their fuzzer with the address and undefined-behaviour sanitizers and runs it.

`python tests/native/sanitize.py [--cases N] [--seed S] [--levels portable,avx2,…]`; needs no installed package. For
another machine than this one, without sanitizers: `CXX="python -m ziglang c++ -target aarch64-linux-musl" python
tests/native/sanitize.py --machine aarch64 --emulator qemu-aarch64-static`.
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "adaattn_hf" / "backends" / "native"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]


def compile_fuzzer(
    target: Path, levels: list[str] | None = None, optimise: str = "-O1", machine: str = ""
) -> Path:
    """Compiles the fuzzer into `target`, with sanitizers unless it is for another `machine`.

    `levels` limits the instruction sets.

    Raises:
        RuntimeError: There is no compiler, or it failed.
    """
    build = runpy.run_path(str(NATIVE / "build.py"))
    command = build["compiler"]()
    if command is None:
        raise RuntimeError("sanitize: no C++ compiler was found; install one or set CXX")
    known = build["levels"](machine or platform.machine().lower())
    sanitize = ["-static"] if machine else SANITIZE
    flags = [f for f in build["FLAGS"] if f != "-O3"] + [optimise, "-w", *sanitize, f"-I{NATIVE / 'src'}"]
    jobs = {"dispatch": [str(NATIVE / "src" / "dispatch.cpp")]}
    jobs["fuzz"] = [str(HERE / "fuzz.cpp"), "-fexceptions", "-frtti"]
    for name, extra in known.items():
        define = [f"-DADA_NS=ada_{name}", f"-DADA_TABLE=ada_kernels_{name}"]
        absent = [] if levels is None or name in levels else ["-DADA_ABSENT"]
        jobs[name] = [str(NATIVE / "src" / "kernels.cpp"), *define, *absent, *extra]

    def run(name: str) -> str:
        done = subprocess.run(
            [*command, *flags, *jobs[name], "-c", "-o", str(target / f"{name}.o")],
            capture_output=True,
            text=True,
        )
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        errors = "".join(pool.map(run, jobs))
    program = target / "fuzz"
    objects = [str(target / f"{name}.o") for name in jobs]
    done = subprocess.run([*command, *sanitize, *objects, "-o", str(program)], capture_output=True, text=True)
    if errors or done.returncode:
        raise RuntimeError(f"sanitize: the compiler failed: {(errors + done.stderr)[-2000:]}")
    return program


def main() -> int:
    """Compiles and runs; the exit status is the fuzzer's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", default="")
    parser.add_argument(
        "--machine", default="", help="machine that CXX compiles for, if not this one: aarch64"
    )
    parser.add_argument("--emulator", default="", help="program that runs its programs here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        levels = asked.levels.split(",") if asked.levels else None
        program = compile_fuzzer(Path(scratch), levels, machine=asked.machine)
        run = [*asked.emulator.split(), str(program), str(asked.seed), str(asked.cases)]
        return subprocess.run(run).returncode


if __name__ == "__main__":
    sys.exit(main())
