"""Run by Python at its start under `adaattn run`: registers AdaAttn's names once Transformers has been imported.

Python imports the first `sitecustomize` on its path. This one hands on to the next, so that an environment keeps its
own.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = str(Path(__file__).resolve().parent)


class _Registering:
    """A loader that imports `adaattn_hf` when Transformers is there."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute Transformers' module, then register, and give models the plan of `adaattn run --plan`."""
        self._loader.exec_module(module)
        importlib.import_module("adaattn_hf")
        if plan := os.environ.get("ADAATTN_PLAN"):
            importlib.import_module("adaattn_hf.patches.plans.everywhere").give(plan)


class _Finder:
    """Finds Transformers as everybody else does, and puts the loader above around its own.

    It stays: programs ask where Transformers is long before they import it.
    """

    _asking = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """The specification of Transformers; None for every other module."""
        if name != "transformers" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)  # type: ignore[assignment]
        return spec


def _hand_on() -> None:
    others = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.path[:] = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != HERE]
sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
_hand_on()
