"""This machine's table of measured backends, which the automatic choice of a backend follows.

There is one file per device in the user's cache directory. `adaattn tune` writes it; with ADAATTN_TUNE=first each class
of calls is measured when it first occurs. A table is valid for the device, driver, packages and kernels in its key.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import warnings
from importlib import metadata
from pathlib import Path

import torch

import adaattn_hf.backends
from adaattn_hf._files import write_atomically
from adaattn_hf.attention.request import CallSpec
from adaattn_hf.backends.capability import cpu_name, driver
from adaattn_hf.backends.clocks import Clock
from adaattn_hf.backends.native.library import level_here
from adaattn_hf.backends.select import order, refusals_of, use_measured
from adaattn_hf.backends.table import Cell, Table, TableError, cell_of, clearly_faster
from adaattn_hf.backends.tuning import measure
from adaattn_hf.errors import from_environment

VARIABLE = "ADAATTN_TUNE"
SETTINGS = {
    "off": "no table is read",
    "file": "the table that `adaattn tune` wrote is read, where there is one",
    "first": "a class of calls that the table lacks is measured at its first call, and kept",
}
"""Values of ADAATTN_TUNE; without it `file`."""

PACKAGES = {
    "cpu": ("adaattn-hf", "torch"),
    "cuda": (
        "adaattn-hf", "torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "fa3-fwd",
        "nvidia-cutlass-dsl",
    ),
}  # fmt: skip


def setting() -> str:
    """Returns how tables are used: the value of ADAATTN_TUNE, else `file`.

    Raises:
        UsageError: It is not one of SETTINGS.
    """
    return from_environment(VARIABLE, SETTINGS, "file")


def path_of(device: str) -> Path:
    """Returns the file of a device's table, named after the device, in XDG_CACHE_HOME or `~/.cache`."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    room = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return room / "adaattn_hf" / f"tuned-{device}-{slug}.json"


@functools.cache
def key_of(device: str) -> dict[str, str]:
    """Returns what measurements depend on besides the call: device, driver, versions of packages and kernels."""
    key = {"kernels": _digest()}
    if device == "cuda":
        key |= {"device": torch.cuda.get_device_name(), "driver": driver(), "cuda": str(torch.version.cuda)}
    else:
        key |= {"device": cpu_name(), "level": level_here()}
    for name in PACKAGES[device]:
        try:
            key[name] = torch.__version__ if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return key


def _digest() -> str:
    """Returns a short hash of the backends' sources and of the compiled library."""
    digest = hashlib.sha256()
    for path in sorted(Path(adaattn_hf.backends.__file__).parent.glob("*/*")):
        if path.suffix in (".py", ".so"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_tables: dict[str, Table | None] = {}
_unusable: set[str] = set()
"""Devices whose file is damaged or was measured under another key."""


def current(device: str) -> Table | None:
    """Returns the table of a device, None without one; read once, with a warning if it cannot be used."""
    if device not in PACKAGES or (device == "cuda" and not torch.cuda.is_available()):
        return None
    if device not in _tables:
        path, _tables[device] = path_of(device), None
        try:
            if os.path.exists(path):
                _tables[device] = Table.read(path, key_of(device))
        except TableError as error:
            _unusable.add(device)
            warnings.warn(f"adaattn: {error}; until then, calls go by the built-in order", stacklevel=2)
    return _tables[device]


def begin(device: str) -> str:
    """Deletes a table that cannot be used, so that a new one can be made; returns why, empty if none was deleted."""
    path, said = path_of(device), ""
    try:
        if path.exists():
            Table.read(path, key_of(device))
    except TableError as error:
        said = str(error)
        path.unlink()
    forget()
    return said


def forget() -> None:
    """Forgets tables and choices, so that the next call reads and chooses anew."""
    _tables.clear()
    _unusable.clear()
    key_of.cache_clear()
    use_measured(preferred)


def preferred(spec: CallSpec, default: str) -> tuple[str, ...]:
    """Returns the backends that are clearly faster than `default` for a call by this machine's table, best first."""
    asked, cell = setting(), cell_of(spec)
    if asked == "off" or cell is None or (spec.device == "cuda" and not torch.cuda.is_available()):
        return ()
    table = current(spec.device)
    if asked == "first" and (table is None or cell not in table.cells) and not _busy(spec.device):
        table = keep(spec.device, cell)
    return clearly_faster({} if table is None else table.cells.get(cell, {}), default)


def elsewhere(spec: CallSpec) -> dict[str, list[Cell]]:
    """Returns by backend the classes of calls like this one, of any length, that the table gives to it."""
    table = current(spec.device) if setting() != "off" else None
    like = cell_of(spec._replace(length=1, holes=False))
    found: dict[str, list[Cell]] = {}
    if table is None or like is None:
        return found
    for cell, times in table.cells.items():
        if like._replace(length=cell.length, work=cell.work) == cell:
            size = 1 << 3 * cell.work
            exact = spec._replace(length=cell.length, holes=False, pairs=size, kv_bytes=size)
            first = next(name for name in order(exact) if not refusals_of(name, exact))
            for name in clearly_faster(times, first)[:1]:
                found.setdefault(name, []).append(cell)
    return found


def keep(device: str, cell: Cell, clock: Clock | None = None) -> Table:
    """Measures one more class of calls, and returns the table; writes its file unless an unusable one is in its place.

    Args:
        device: `cpu` or `cuda`.
        cell: The class of calls.
        clock: Replaces the device's own clock.
    """
    path = path_of(device)
    table = _tables[device] = current(device) or Table(key_of(device))
    table.cells[cell] = measure(device, cell, clock)
    try:
        if device not in _unusable:
            write_atomically(path, table.text())
    except OSError as error:
        warnings.warn(f"adaattn: {path} cannot be written ({error}); set XDG_CACHE_HOME", stacklevel=2)
    return table


def _busy(device: str) -> bool:
    """Whether operations are being recorded, by CUDA graph capture or a dispatch mode, so that nothing may be timed."""
    capturing = device == "cuda" and torch.cuda.is_current_stream_capturing()
    return capturing or torch._C._len_torch_dispatch_stack() > 0
