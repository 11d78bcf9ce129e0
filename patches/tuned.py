"""What was measured on this machine has a say in what `auto` takes: the user's table, read once.

A file per device in the user's cache, made by `adaattn tune`, or class by class at the first call of each where
ADAATTN_TUNE is `first`. It speaks for the device, driver, packages and kernels in its key alone.
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
from adaattn_hf.backends.native.library import library
from adaattn_hf.backends.select import order, refusals_of, use_measured
from adaattn_hf.backends.table import Cell, Table, TableError, cell_of, clearly_faster
from adaattn_hf.backends.tuning import measure
from adaattn_hf.errors import unknown

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


def setting(asked: str | None = None) -> str:
    """How tables are used: what is asked for, else what ADAATTN_TUNE says, else `file`.

    Raises:
        ValueError: None of SETTINGS.
    """
    asked = asked or os.environ.get(VARIABLE) or "file"
    if asked not in SETTINGS:
        raise ValueError(unknown(VARIABLE, asked, SETTINGS))
    return asked


def path_of(device: str) -> Path:
    """The file of a device's table, by the device's name; in XDG_CACHE_HOME, else in `~/.cache`."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    room = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return room / "adaattn_hf" / f"tuned-{device}-{slug}.json"


@functools.cache
def key_of(device: str) -> dict[str, str]:
    """What the figures of a table depend on besides the call."""
    key = {"kernels": _digest()}
    if device == "cuda":
        key |= {"device": torch.cuda.get_device_name(), "driver": driver(), "cuda": str(torch.version.cuda)}
    else:
        loaded = library()
        key |= {"device": cpu_name(), "level": "none" if loaded is None else loaded.level_name}
    for name in PACKAGES[device]:
        try:
            key[name] = torch.__version__ if name == "torch" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return key


def _digest() -> str:
    """A short hash of the backends' own sources and of the compiled library."""
    digest = hashlib.sha256()
    for path in sorted(Path(adaattn_hf.backends.__file__).parent.glob("*/*")):
        if path.suffix in (".py", ".so"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_tables: dict[str, Table | None] = {}
_unusable: set[str] = set()
"""Devices whose file is damaged, or speaks for something else."""


def current(device: str) -> Table | None:
    """The table of a device, read once; None where there is none. One that cannot be used is named in a warning."""
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
    """Make room for measurements: a file that cannot be used here is deleted. Says why, empty where none was."""
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
    """Read the tables anew at the next call, and choose anew."""
    _tables.clear()
    _unusable.clear()
    key_of.cache_clear()
    use_measured(preferred)


def preferred(spec: CallSpec, default: str) -> tuple[str, ...]:
    """Backends that this machine's table holds to be clearly faster than `default` for a call; best first."""
    asked, cell = setting(), cell_of(spec)
    if asked == "off" or cell is None or (spec.device == "cuda" and not torch.cuda.is_available()):
        return ()
    table = current(spec.device)
    if asked == "first" and (table is None or cell not in table.cells) and not _busy(spec.device):
        table = keep(spec.device, cell)
    return clearly_faster({} if table is None else table.cells.get(cell, {}), default)


def elsewhere(spec: CallSpec) -> dict[str, list[Cell]]:
    """Classes of calls like one, of whatever length, that the table takes out of the built-in order; by backend."""
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
    """The table with one more class of calls, measured now. Writes its file, but over none that cannot be used here.

    Args:
        device: `cpu` or `cuda`.
        cell: What is measured.
        clock: Measures instead of the device's own clock.
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
    """Whether what happens now is recorded: by a graph of the device, or by whoever listens to torch's dispatcher."""
    capturing = device == "cuda" and torch.cuda.is_current_stream_capturing()
    return capturing or torch._C._len_torch_dispatch_stack() > 0
