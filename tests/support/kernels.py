"""Kernel repositories of `hub/`, built here, and their modules as Transformers' loader makes them."""

import atexit
import importlib.util
import json
import runpy
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from adaattn_hf.backends.native.library import library

ROOT = Path(__file__).resolve().parents[2]
BUILDER: dict[str, Any] = runpy.run_path(str(ROOT / "hub" / "build.py"))
"""The names of `hub/build.py`."""
CPU = "torch-stable-abi26-cpu-*"


def build(name: str, out: Path) -> Path:
    native = library()
    assert native is not None, "the native library was not built here"
    repository: Path = BUILDER["build"](name, out, library=native.path)
    return repository


def load(repository: Path) -> ModuleType:
    """The module of a repository's CPU variant under its own unique name, as the loader makes it."""
    (directory,) = (repository / "build").glob(CPU)
    unique = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))["id"]
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, directory / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return module


@cache
def kernel(name: str) -> ModuleType:
    out = Path(tempfile.mkdtemp(prefix="kernels"))
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    return load(build(name, out))
