"""Bases and means of plans: kept in memory by their hash, read from a safetensors file, or carried in settings."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from .plan import TENSORS_FILE, Plan, PlanError
from .reading import read_plan
from .tensors import MOST_CARRIED, LayerTensors, carried_bytes

CARRIED = "tensors"
"""Key of the bases and means in a configuration's settings."""
_tensors: dict[str, dict[str, Tensor]] = {}
"""Bases and means of plans by their hash, those that were used last at the end."""
_MOST = 64
"""Plans whose bases and means are kept."""


def remember_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Keeps bases and means in memory, and returns their hash; empty if there are none.

    Those of the plans that were used last are kept; a plan whose tensors are gone needs its file again.
    """
    if not tensors:
        return ""
    name = hashlib.sha256(save(dict(tensors))).hexdigest()
    _kept(name, lambda: dict(tensors))
    return name


def _kept(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a hash, made now if they are not in memory."""
    found = _tensors.pop(name, None)
    found = _tensors[name] = make() if found is None else found
    while len(_tensors) > _MOST:
        del _tensors[next(iter(_tensors))]
    return found


def tensor_bytes(plan: Plan) -> bytes | None:
    """Returns the safetensors file of a plan whose tensors are in memory, `None` for a plan without any."""
    if not plan.tensors:
        return None
    return save(_found(plan, None))


def read_tensors(plan: Plan, directory: str | Path | None) -> None:
    """Reads the plan's safetensors file, checking its hash.

    Raises:
        PlanError: If the file is absent or is another than the plan names.
    """
    if plan.tensors:
        _found(plan, str(directory) if directory is not None else None)


def _found(plan: Plan, source: str | None, raw: Any = None) -> dict[str, Tensor]:
    return _kept(plan.tensors, lambda: _read(plan, source, raw))


def _read(plan: Plan, source: str | None, raw: Any) -> dict[str, Tensor]:
    """Returns the tensors from the directory that a model came from, or from its settings."""
    carried = raw.get(CARRIED) if isinstance(raw, Mapping) else None
    path = _file(source)
    if path is None and isinstance(carried, str):
        return _checked(plan, carried_bytes(carried), f"config.adaattn[{CARRIED!r}]")
    if path is None:
        raise PlanError(
            f"the plan needs {TENSORS_FILE}, which is not in {source!r}; copy it beside the weights, or call "
            "adaattn_hf.load_plan(model, directory) with the directory that holds it"
        )
    return _checked(plan, path.read_bytes(), str(path))


def _carry(plan: Plan, raw: Any) -> None:
    """Adds bases and means to a model's settings, so that they are saved with the model."""
    if isinstance(raw, dict) and raw.get(CARRIED) is None:
        data = tensor_bytes(plan)
        if data is not None and len(data) <= MOST_CARRIED:
            raw[CARRIED] = base64.b64encode(data).decode("ascii")


def _checked(plan: Plan, data: bytes, where: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file after comparing its hash with the plan's."""
    found = hashlib.sha256(data).hexdigest()
    if found != plan.tensors:
        raise PlanError(
            f"{where} has hash {found[:12]}…, the plan names {plan.tensors[:12]}…; calibrate again"
        )
    return load(data)


def _file(source: str | None) -> Path | None:
    if not source:
        return None
    path = Path(source) / TENSORS_FILE
    if path.is_file():
        return path
    # not a repository id (`owner/name`), so a directory that does not exist
    if path.parent.is_dir() or source.count("/") != 1 or source.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, TENSORS_FILE)
    return Path(cached) if isinstance(cached, str) else None


def layer_tensors(plan: Plan, index: int, source: str | None, raw: Any) -> LayerTensors:
    """Returns the bases and means of a layer of a plan, from memory, the file at `source` or the settings `raw`."""
    tensors = _found(plan, source, raw)
    _carry(plan, raw)
    prefix = f"layers.{index}."
    bases: dict[str, dict[int, Tensor]] = {"query_basis": {}, "key_basis": {}}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            kind, _, head = name.removeprefix(prefix).partition(".")
            if kind in bases:
                bases[kind][int(head)] = tensor
    return LayerTensors(tensors.get(f"{prefix}key_mean"), bases["query_basis"], bases["key_basis"])


def with_tensors(plan: Plan | str | Path) -> Plan:
    """Returns a plan, or the one in a file or directory, whose tensors lie beside it and are read, too."""
    if isinstance(plan, Plan):
        return plan
    path, plan = Path(plan), read_plan(plan)
    read_tensors(plan, path if path.is_dir() else path.parent)
    return plan
