"""Kernel repositories built once for all tests, and their module as a loader makes it."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaattn_hf.backends.native.library import library

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = "torch-stable-abi26-cpu-*"


@pytest.fixture(scope="session")
def builder() -> dict[str, Any]:
    """The names of `hub/build.py`."""
    return runpy.run_path(str(ROOT / "hub" / "build.py"))


@pytest.fixture(scope="session")
def repositories(builder: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kernel repositories, with the library that is installed here instead of a new one."""
    native = library()
    if native is None:
        pytest.skip("the native library was not built here")
    out = tmp_path_factory.mktemp("hub")
    for name in builder["NAMES"]:
        builder["build"](name, out, library=native.path)
    return out


@pytest.fixture(scope="session")
def load_kernel(repositories: Path) -> Callable[[str], ModuleType]:
    """Makes the module of a repository's CPU variant under its own unique name, as the loader does."""

    def load(name: str) -> ModuleType:
        (directory,) = (repositories / name / "build").glob(CPU)
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

    return load


@pytest.fixture(scope="session")
def flash(load_kernel: Callable[[str], ModuleType]) -> Any:
    """The kernel `flash-adaattn`."""
    return load_kernel("flash-adaattn")
