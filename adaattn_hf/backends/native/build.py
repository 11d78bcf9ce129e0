"""Compiles the native library with whatever C++ compiler there is; never raises for want of one, or of room.

Uses the standard library alone: the package's build loads it. To build again: `python -m adaattn_hf.backends.native`.
"""

import hashlib
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
AGAIN = "run `python -m adaattn_hf.backends.native`"
NO_ROOM = ("No space left on device", "quota exceeded")
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
    return {"portable": [], "neon": []} if machine in ("aarch64", "arm64") else {"portable": []}


def compiler() -> list[str] | None:
    """The command of the C++ compiler: `$CXX` if set, else the first of c++, g++, clang++ that exists."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation that does not end
        return None
    commands = [named] if named else [["c++"], ["g++"], ["clang++"]]
    return next((command for command in commands if shutil.which(command[0])), None)


def build(target: Path, extra: Sequence[str] = ()) -> dict[str, object]:
    """Compiles the library or leaves that of these sources; reports `built`, `reason` if not, `compiler`, `levels`."""
    sources = hashlib.sha256(b"".join(one.read_bytes() for one in sorted(SOURCES.iterdir()))).hexdigest()
    report: dict[str, object] = {"built": False, "reason": "", "compiler": "", "levels": [], "sources": sources}
    made, said, stays = target / NAME, target / REPORT, ""
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not (said.is_file() and sources.encode() in said.read_bytes()):
            made.unlink(missing_ok=True)  # calls would not tell what it computes from what these sources do
        stays = "; the library of an earlier build stays" if made.is_file() else ""
        with tempfile.TemporaryDirectory(prefix=".build.", dir=target) as scratch:
            if reason := _compile(Path(scratch), extra, report):
                report["reason"] = reason + stays
            Path(scratch, REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            for path in (said,) if reason else (made, said):
                os.replace(Path(scratch, path.name), path)
    except OSError as error:
        needs = f"expected a compiler that starts, and room in a directory that can be written, {target}"
        report |= {"built": False, "levels": [], "reason": f"got {error}, {needs}; see to that and {AGAIN}{stays}"}
    return report


def _compile(scratch: Path, extra: Sequence[str], report: dict[str, object]) -> str:
    """Every level as an object of its own, but those that this compiler does not know; says why there is no library."""
    if sys.platform not in ("linux", "darwin"):
        return f"no build for the platform {sys.platform!r}; Linux and macOS have one"
    if (command := compiler()) is None:  # a system that has no build is not asked for one
        where = f"CXX={named!r} names none" if (named := os.environ.get("CXX")) else "there is no c++, g++ or clang++"
        return f"no C++ compiler ({where}); install one and {AGAIN}"

    def run(*arguments: str) -> tuple[str, str]:
        english = {**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)}
        done = subprocess.run(  # noqa: S603
            [*command, *arguments], capture_output=True, text=True, errors="replace", check=False, env=english
        )
        return done.stdout, "" if done.returncode == 0 else (done.stderr or f"exit status {done.returncode}")

    report["compiler"] = (run("--version")[0].splitlines() or [" ".join(command)])[0]
    base = [*FLAGS, *([] if "clang" in str(report["compiler"]) else GCC_FLAGS), *extra]
    kernels, dispatch = str(SOURCES / "kernels.cpp"), str(SOURCES / "dispatch.cpp")
    targets = levels(platform.machine().lower())
    objects = {name: str(scratch / f"{name}.o") for name in (*targets, "dispatch")}

    def compile_level(name: str) -> str:
        names = [f"-DADA_NS=ada_{name}", f"-DADA_TABLE=ada_kernels_{name}", "-c", kernels]
        return run(*base, *(["-c", dispatch] if name == "dispatch" else targets[name] + names), "-o", objects[name])[1]

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        errors = dict(zip(objects, pool.map(compile_level, objects), strict=True))
    for name, error in errors.items():  # a level is left out for what the compiler is, not for the room there is
        if error and (name in ("dispatch", "portable") or any(one in error for one in NO_ROOM)):
            return f"the compiler failed on {name}: {error[-600:]}"
    for name in (one for one in targets if errors[one]):
        run(*base, f"-DADA_TABLE=ada_kernels_{name}", "-DADA_ABSENT", "-c", kernels, "-o", objects[name])
    if failed := run(*base, "-shared", "-pthread", *objects.values(), "-o", str(scratch / NAME))[1]:
        return f"the linker failed: {failed[-600:]}"
    report |= {"built": True, "levels": [name for name in targets if not errors[name]]}
    return ""


def main() -> int:
    """Builds in place and prints the report."""
    report = build(Path(__file__).parent)
    print(json.dumps(report, indent=1))
    return 0 if report["built"] else 1
