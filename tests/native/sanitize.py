"""Builds the kernels and their fuzzers with the address and undefined-behaviour sanitizers and runs them.

`python tests/native/sanitize.py [--cases N] [--seed S] [--levels portable,avx2,…]`; needs no installed package. With
`--python INTERPRETER`, of an environment that has the package, as many valid and as many malformed calls go through
Python into a library with the sanitizers, too. For another machine than this one, without sanitizers:
`CXX="python -m ziglang c++ -target aarch64-linux-musl" python tests/native/sanitize.py --machine aarch64 --emulator
qemu-aarch64-static`. What came of the C calls is kept in `build/`, from where `make fuzz` takes it into its page.
"""

import argparse
import datetime
import json
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
BOUND_LAYERS = ("fuzz", "malformed")
"""The calls that must be right, and those that must be refused; each a C++ file beside this one."""
THROUGH_PYTHON = ("valid", "plans", "malformed", "rules", "stored")
"""Kinds of the random search that call the kernels; whole models would take minutes under the sanitizers."""


def compile_fuzzers(
    target: Path, levels: list[str] | None = None, optimise: str = "-O1", machine: str = ""
) -> list[Path]:
    """Compiles the fuzzers into `target`, with sanitizers unless for another `machine`; `levels` bound it."""
    build = runpy.run_path(str(NATIVE / "build.py"))
    command = build["compiler"]()
    if command is None:
        raise RuntimeError("sanitize: no C++ compiler was found; install one or set CXX")
    known = build["levels"](machine or platform.machine().lower())
    sanitize = ["-static"] if machine else SANITIZE
    flags = [f for f in build["FLAGS"] if f != "-O3"] + [optimise, "-w", *sanitize, f"-I{NATIVE / 'src'}"]
    jobs = {"dispatch": [str(NATIVE / "src" / "dispatch.cpp")]}
    for program in BOUND_LAYERS:
        jobs[program] = [str(HERE / f"{program}.cpp"), "-fexceptions", "-frtti"]
    for name, extra in known.items():
        define = [f"-DADA_NS=ada_{name}", f"-DADA_TABLE=ada_kernels_{name}"]
        absent = [] if levels is None or name in levels else ["-DADA_ABSENT"]
        jobs[name] = [str(NATIVE / "src" / "kernels.cpp"), *define, *absent, *extra]

    def run(name: str) -> str:
        done = subprocess.run(
            [*command, *flags, *jobs[name], "-c", "-o", str(target / f"{name}.o")], capture_output=True, text=True
        )
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        errors = "".join(pool.map(run, jobs))
    programs = [target / program for program in BOUND_LAYERS]
    shared = [str(target / f"{name}.o") for name in jobs if name not in BOUND_LAYERS]
    links = {path: [f"{path}.o", *shared] for path in programs}
    if not machine:
        links[target / build["NAME"]] = ["-shared", *shared]
    for path, parts in links.items():
        link = [*command, *sanitize, *parts, "-o", str(path)]
        done = subprocess.run(link, capture_output=True, text=True)
        if errors or done.returncode:
            raise RuntimeError(f"sanitize: the compiler failed: {(errors + done.stderr)[-2000:]}")
    return programs


def search(python: str, library: Path, cases: int, seed: int) -> int:
    """Runs the random search through Python with the sanitized library; returns its exit status."""
    runtimes = [
        subprocess.run(["gcc", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan", "libubsan")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(path.strip() for path in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [python, str(HERE.parent / "property" / "search.py"), "--cases", str(cases), "--seed", str(seed)]
    command += ["--library", str(library), "--state", str(library / "search.json"), "--kinds", *THROUGH_PYTHON]
    return subprocess.run(command, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", default="")
    parser.add_argument("--machine", default="", help="machine that CXX compiles for, if not this one: aarch64")
    parser.add_argument("--emulator", default="", help="program that runs its programs here")
    parser.add_argument(
        "--python", default="", help="interpreter of an environment with the package, for calls from Python"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        levels = asked.levels.split(",") if asked.levels else None
        programs = compile_fuzzers(Path(scratch), levels, machine=asked.machine)
        numbers = [str(asked.seed), str(asked.cases)]
        runs = [subprocess.run([*asked.emulator.split(), str(path), *numbers]) for path in programs]
        codes = [abs(run.returncode) for run in runs]
        told = {"machine": asked.machine or platform.machine().lower(), "cases": asked.cases, "seed": asked.seed}
        told |= {"by": asked.emulator or "address and undefined-behaviour sanitizers"}
        failed = [program.name for program, code in zip(programs, codes, strict=True) if code]
        told |= {"date": datetime.date.today().isoformat(), "failed": failed}
        kept = HERE.parents[1] / "build" / f"fuzz_{told['machine']}.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(told) + "\n")
        if asked.python:
            codes.append(search(asked.python, Path(scratch), asked.cases, asked.seed))
        return max(codes)


if __name__ == "__main__":
    sys.exit(main())
