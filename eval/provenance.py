"""Where a number came from: versions, machine, checkout."""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import adaattn_hf
import adaattn_hf.eval
import adaattn_hf.patches
from adaattn_hf.backends import capability
from adaattn_hf.backends.native.library import level_here
from adaattn_hf.errors import UsageError

PACKAGES = ("adaattn-hf", "torch", "transformers", "numpy", "scipy", "tokenizers", "datasets", "lm-eval", "flash-attn")


def version_of(package: str) -> str:
    """Version of a distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, machine, threads, the commit of the checkout (None outside one) and a digest of the source that ran.

    Processors of one name differ in what they have: the instruction set is that of the native kernels.
    """
    cuda = device.type == "cuda"
    return {
        "versions": {package: version for package in PACKAGES if (version := version_of(package))},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": capability.cpu_name(),
        "instructions": level_here(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "driver": f"CUDA {torch.version.cuda}, driver {capability.driver()}" if cuda else None,
        "commit": commit(Path(adaattn_hf.__file__).parent),
        "source": source_digest(),
    }


def processor(made: Mapping[str, Any]) -> str:
    """The processor of a record in words, with its instruction set where that was recorded."""
    instructions = made.get("instructions", "none")
    return str(made["cpu"]) if instructions == "none" else f"{made['cpu']} ({instructions})"


def source_digest() -> str:
    """sha256 of the package's Python and C++ files by name: says which source ran where no commit does."""
    digest = hashlib.sha256()
    rooms = [Path(package.__file__ or "").parent for package in (adaattn_hf, adaattn_hf.patches, adaattn_hf.eval)]
    for room in rooms:
        for path in sorted(room.rglob("*")):
            if path.suffix in (".py", ".cpp", ".hpp", ".h"):
                digest.update(f"{room.name}/{path.relative_to(room).as_posix()}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def commit(directory: Path) -> str | None:
    """What ADAATTN_COMMIT says (UsageError if it is no commit), else the commit of the checkout that holds a directory.

    The latter is marked `+dirty` where tracked files differ. The variable counts first: files that were copied to
    another machine may lie in a checkout of another commit there.
    """
    if named := os.environ.get("ADAATTN_COMMIT"):
        if re.fullmatch(r"[0-9a-f]{7,64}(\+dirty)?", named):
            return named
        raise UsageError(
            f"ADAATTN_COMMIT: got {named!r}, expected the digits of a commit, as `git rev-parse HEAD` prints them, "
            "followed by +dirty where files differ; or leave it unset"
        )

    def git(*words: str) -> str:
        command = ["git", "-C", str(directory), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return done.stdout.strip()

    try:
        # A package in site-packages may lie under somebody else's checkout: only our own file counts.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
