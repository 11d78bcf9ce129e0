"""Where a number came from: versions, machine, checkout."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import adaattn_hf

PACKAGES = (
    "adaattn-hf",
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "tokenizers",
    "datasets",
    "lm-eval",
    "flash-attn",
)


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, machine, threads and the commit of the checkout (None outside one)."""
    return {
        "versions": _versions(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "commit": commit(Path(adaattn_hf.__file__).parent),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit(directory: Path) -> str | None:
    """The commit of the checkout that holds a directory, marked `+dirty` where tracked files differ."""
    command = ["git", "-C", str(directory)]
    try:
        head = subprocess.run(  # noqa: S603
            [*command, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
        # A package in site-packages may lie under somebody else's checkout: only our own file counts.
        subprocess.run(  # noqa: S603
            [*command, "ls-files", "--error-unmatch", "__init__.py"],
            capture_output=True,
            timeout=10,
            check=True,
        )
        status = subprocess.run(  # noqa: S603
            [*command, "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+dirty" if status.stdout.strip() else "")
