"""Builds the kernel repositories of this directory: `python hub/build.py [NAME …] [--out DIRECTORY]`.

A kernel repository holds a few files of its own (`hub/NAME`) and, in `build/VARIANT`, a Python package that stands
alone: the kernel's own modules, and the modules of `adaattn_hf` that they import, copied as they are (relative imports
make a module work in either place; those of `patches/` name the package, and are copied with relative ones). Two
variants are made: one for CPUs of this machine's kind with the native library, which is plain C behind `ctypes` and so
serves every torch from the named one on; one for CUDA devices, in Triton.

Needs a C++ compiler and the standard library. To publish, build where the system libraries are old enough for
everybody (manylinux_2_28); `--portable` refuses a library that needs newer ones.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import platform
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "adaattn_hf"
MAPPED = "patches/"
"""A directory beside the package that is installed inside it; what a kernel imports of it knows no Transformers."""
NAMES = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/build.toml")))
NATIVE = "backends/native"
LEAST_TORCH = "26"
"""Major and minor version of the oldest torch that the variants are offered to."""
ALLOWED = {*sys.stdlib_module_names, "torch", "triton"}
WHERE_INSTALLED = {
    "backends/triton/": {"numpy"},
    "plans/store.py": {"huggingface_hub", "safetensors"},
}
"""What modules of a directory may import besides: they are themselves imported at the first call of a CUDA device that
needs it, and the last two where a plan's files are asked for, which no kernel does. All come with Transformers."""
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
"""Newest versions of system symbols that a published library may need: those of manylinux_2_28."""


FIGURES = ROOT / "docs" / "results" / "hub_kernel.md"
FIGURES_MARK = "<!-- figures -->\n"
"""What stands in a card for the measured figures, which `make hub-speed` keeps in the page above."""


class BuildError(RuntimeError):
    """The kernel repository cannot be built as asked."""


def variants() -> dict[str, str]:
    """What is built on this machine: directories below `build/`, by which the loader finds its own, to their backends.

    The one for CPUs holds the native library.
    """
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    return {f"torch-stable-abi{LEAST_TORCH}-cpu-{machine}-{platform.system().lower()}": "cpu", "torch-cuda": "cuda"}


def own_modules(name: str) -> dict[str, Path]:
    """The kernel's own modules by their path inside the built package."""
    directory = Path(__file__).parent / name / "torch-ext" / name.replace("-", "_")
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*.py"))}


def package_modules(name: str) -> dict[str, Path]:
    """All modules of the built package: the kernel's own, and what they import of `adaattn_hf`, step by step.

    Raises:
        BuildError: An import that leads out of the package, torch, Triton and the standard library.
    """
    modules = own_modules(name)
    waiting = list(modules)
    while waiting:
        at = waiting.pop()
        for target in sorted(set(imports(at, modules[at]))):
            if target in modules:
                continue
            path = source_of(target)
            if not path.is_file():
                raise BuildError(f"{modules[at]}: imports {target}, which neither hub/{name} nor adaattn_hf holds")
            modules[target] = path
            waiting.append(target)
    return dict(sorted(modules.items()))


def source_of(target: str) -> Path:
    """Where a module of `adaattn_hf` lies, by its path inside the package."""
    return (ROOT if target.startswith(MAPPED) else PACKAGE) / target


def imports(at: str, path: Path) -> Iterator[str]:
    """Yields the modules that a module imports relatively, with the packages above them, by path in the package.

    Raises:
        BuildError: An absolute import that a kernel may not make.
    """
    package = at.split("/")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found: list[list[str]] = []  # what is imported, by its parts
        foreign: list[str] = []
        if isinstance(node, ast.Import):
            foreign = [alias.name for alias in node.names]
        elif isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'{__package__}."):
            # a module imported by name at the first call
            found = [[*package, *ast.literal_eval(ast.unparse(node.values[1])).strip(".").split(".")]]
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level > len(package) + 1:
                raise BuildError(f"{path}:{node.lineno}: imports from above the package")
            if node.level:
                parts = [*package[: len(package) - node.level + 1], *parts]
            elif at.startswith(MAPPED) and len(parts) > 1 and parts[0] == "adaattn_hf":
                parts = parts[1:]
            else:
                foreign, parts = [node.module or ""], []
            found = [[*parts, alias.name] for alias in node.names] if not foreign else []
        for name in foreign:
            more = (names for directory, names in WHERE_INSTALLED.items() if at.startswith(directory))
            if name.partition(".")[0] not in ALLOWED.union(*more):
                raise BuildError(f"{path}: imports {name}; a kernel may import torch, triton and the standard library")
        for parts in found:
            for depth in range(1, len(parts) + 1):
                stem = "/".join(parts[:depth])
                yield from (one for one in (f"{stem}/__init__.py", f"{stem}.py") if source_of(one).is_file())


def copy_of(inside: str, path: Path) -> bytes:
    """What a kernel holds of a module: its file, where that lies below the package, with relative imports."""
    source = path.read_bytes()
    # one dot for the directory that the module lies in, one more for each above it up to the package
    dots = b"." * (inside.count("/") + 1)
    return source.replace(b"from adaattn_hf.", b"from " + dots) if inside.startswith(MAPPED) else source


def build(name: str, out: Path, *, library: Path | None = None, portable: bool = False) -> Path:
    """Builds one kernel repository.

    Args:
        name: Directory below `hub/`.
        out: Directory that gets a directory of that name; what lay there is replaced.
        library: A native library of this source to take; compiled anew by default.
        portable: Refuse a library that needs newer system libraries than manylinux_2_28 has.

    Returns:
        The repository.

    Raises:
        BuildError: There is no compiler, an import leads out of the package, or the library is not portable.
    """
    source, target = Path(__file__).parent / name, out / name
    fresh = out / f".{name}.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh, ignore=shutil.ignore_patterns("__pycache__"))
    card = fresh / "CARD.md"
    _, _, figures = FIGURES.read_text(encoding="utf-8").partition("\n\n")  # all but the page's title
    card.write_text(card.read_text(encoding="utf-8").replace(FIGURES_MARK, figures), encoding="utf-8")
    modules = package_modules(name)
    for variant, backend in variants().items():
        directory = fresh / "build" / variant
        for inside, path in modules.items():
            copied = directory / inside
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(copy_of(inside, path))
        if backend == "cpu":
            native = runpy.run_path(str(PACKAGE / NATIVE / "build.py"))
            made = directory / NATIVE / native["NAME"]
            if library is not None:
                shutil.copyfile(library, made)
            else:
                report = native["build"](directory / NATIVE)
                (directory / NATIVE / native["REPORT"]).unlink(missing_ok=True)
                if not report["built"]:
                    raise BuildError(f"native library: {report['reason']}")
            if portable and (too_new := newer_symbols(made.read_bytes())):
                raise BuildError(
                    f"native library: needs {', '.join(too_new)}, newer than manylinux_2_28; build in its container"
                )
        _write_metadata(name, backend, directory)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target


def newer_symbols(library: bytes) -> list[str]:
    """Versions of system symbols in a library that manylinux_2_28 does not have."""
    found = {
        (kind.decode(), tuple(map(int, number.split(b"."))))
        for kind, number in re.findall(rb"(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)", library)
    }
    return [f"{kind}_{'.'.join(map(str, number))}" for kind, number in sorted(found) if number > NEWEST[kind]]


def _write_metadata(name: str, backend: str, directory: Path) -> None:
    """`metadata.json`, with the digest of every other file and a name that no other build has."""
    # published as branch `v<version>`
    text = (Path(__file__).parent / name / "build.toml").read_text(encoding="utf-8")
    version = re.search(r"^version = (\d+)$", text, re.MULTILINE)
    if version is None:
        raise BuildError(f"hub/{name}/build.toml: no line `version = N`")
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    digests = {file: hashlib.sha256(path.read_bytes()).digest() for file, path in files.items()}
    whole = hashlib.sha256(b"".join(file.encode() + b"\0" + digest for file, digest in digests.items()))
    metadata = {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{backend}_{whole.hexdigest()[:8]}",
        "version": int(version.group(1)),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {file: base64.b64encode(digest).decode() for file, digest in digests.items()},
        },
    }
    (directory / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Builds what the command line names and prints where it lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"kernels to build, of {', '.join(NAMES)}; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub", help="directory for the repositories")
    parser.add_argument("--library", type=Path, help="a native library of this source to take instead of compiling")
    parser.add_argument("--portable", action="store_true", help="refuse a library that is not manylinux_2_28")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.names) - set(NAMES))
    if unknown:
        parser.error(f"unknown kernel {unknown[0]!r}, expected one of {', '.join(NAMES)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.names or NAMES:
        print(build(name, asked.out, library=asked.library, portable=asked.portable))
    return 0


if __name__ == "__main__":
    sys.exit(main())
