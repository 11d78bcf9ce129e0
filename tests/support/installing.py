"""Building the package from a copy of the checkout, and virtual environments to install it into."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from .source_tree import ROOT


def checkout_files(root: Path = ROOT) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return sorted(name for name in set(listed.stdout.split("\0")) if name and (root / name).is_file())


def copy_checkout(target: Path, *, with_tests: bool = False) -> Path:
    """A clean copy in `target`: what a build leaves behind stays out of the checkout."""
    for name in checkout_files():
        if name.startswith("tests/") and not with_tests:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    return target


def without_compiler() -> dict[str, str]:
    """An environment in which no C++ compiler is found: the native library is optional, and slow to compile."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "COV"))}
    return {**kept, "CXX": "no-compiler-here", "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def run(command: Sequence[str | Path], cwd: Path, timeout: float = 240) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=without_compiler(), capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[0]} {command[1]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def environment(place: Path) -> Path:
    """A fresh virtual environment that sees the libraries of this one, but not this package; its python."""
    # the `.pth` files among the libraries are not processed, one of which is the editable install of this package
    run([sys.executable, "-m", "venv", "--without-pip", place], cwd=place.parent)
    python = place / "bin" / "python"
    libraries = sysconfig.get_path("purelib")
    site = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "libraries.pth").write_text(f"{libraries}\n")
    return python


def install(python: Path, *what: str | Path) -> None:
    run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--ignore-installed", *what],
        cwd=python.parent,
    )
