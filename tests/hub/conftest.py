"""Kernel repositories built once for all tests, and their module as a loader makes it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaattn_hf.backends.native.library import library

from ..support import kernels


@pytest.fixture(scope="session")
def builder() -> dict[str, Any]:
    return kernels.BUILDER


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if library() is None:
        pytest.skip("the native library was not built here")
    out = tmp_path_factory.mktemp("hub")
    for name in kernels.BUILDER["NAMES"]:
        kernels.build(name, out)
    return out


@pytest.fixture(scope="session")
def load_kernel(repositories: Path) -> Callable[[str], ModuleType]:
    """Makes the module of a repository's CPU variant under its own unique name, as the loader does."""
    return lambda name: kernels.load(repositories / name)


@pytest.fixture(scope="session")
def flash(load_kernel: Callable[[str], ModuleType]) -> Any:
    return load_kernel("flash-adaattn")


@pytest.fixture
def local(repositories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ":".join(f"adaattn/{path.name}={path}" for path in sorted(repositories.iterdir()))
    monkeypatch.setenv("LOCAL_KERNELS", overrides)
