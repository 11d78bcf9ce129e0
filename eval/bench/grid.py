"""The grids of the benchmark: `bench.yaml` beside this file, `bench_cuda.yaml` on a GPU, as records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from adaattn_hf.errors import UsageError

ENGINES = ("onnxruntime", "openvino", "llama.cpp")  # no implementations of Transformers, but libraries of their own


@dataclass(frozen=True)
class Cell:
    """One piece of work in one dtype; the attributes are the keys of the YAML file.

    Attributes:
        level: `attention` or `model`.
        mask: `causal` or `bidirectional`.
        padding: `left` or `right`, with `lengths` tokens per batch row.
        packed: Lengths of documents that lie one behind the other.
        filled: Keys that are in use of a preallocated cache of `kv_len`.
        gradient: Forward and backward; of a model on labels, without dropout and without the optimiser.
        prepared: Ours went through `adaattn_hf.prepare`: padding taken out, a cache that grows in place.
        cached: The model keeps its keys; of a prompt it answers the last logits alone.
        arms: Ours and what is timed beside it, each in a process of its own (`processes.py`); not by `stock` then.
        without: Names of `stock` that are not timed here, unless asked for by name.
        floor: Ratio below which the gate fails.
    """

    name: str
    level: str
    dtype: str
    batch: int
    q_len: int
    floor: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_len: int | None = None
    mask: str = "causal"
    window: int | None = None
    chunk: int | None = None
    padding: str | None = None
    lengths: Sequence[int] = ()
    packed: Sequence[int] = ()
    filled: int | None = None
    gradient: bool = False
    prepared: bool = False
    cached: bool = False
    arms: Sequence[str] = ()
    without: Sequence[str] = ()
    model: str | None = None

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.q_len if self.kv_len is None else self.kv_len

    @property
    def title(self) -> str:
        """Name and dtype."""
        return f"{self.name} ({self.dtype})"


@dataclass(frozen=True)
class Grid:
    """Cells, models, the names of those we compare with, why some cells are slower, and the Python of the engines."""

    cells: tuple[Cell, ...]
    models: Mapping[str, Mapping[str, Any]]
    stock: tuple[str, ...]
    slower: str = ""
    rivals: Path | None = None


def read_grid(path: Path | None = None, device: str = "cpu", rivals: Path | None = None) -> Grid:
    """The grid of a file, or the one that comes with the package: for a device, or beside the engines of `rivals`.

    Floors are those of the device that the file was written for; elsewhere they mean nothing and are left out. A
    UsageError for no file, no grid, or an unknown key of a cell.
    """
    if path is None:
        name = "bench_rivals.yaml" if rivals else "bench_cuda.yaml" if device == "cuda" else "bench.yaml"
        text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    elif not path.is_file():
        raise UsageError(f"grid: {path} is no file; expected YAML like eval/bench/bench.yaml")
    else:
        text = path.read_text(encoding="utf-8")
    try:
        data = yaml.safe_load(text)
        cells = [cell for entry in data["cells"] for cell in _cells(entry, data)]
        if device != data.get("device", device):
            cells = [replace(cell, floor=data["defaults"]["floor"]) for cell in cells]
        slower = data.get("slower", {}).get(device, "")
        return Grid(tuple(cells), data["models"], tuple(data["stock"]), slower, rivals)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        wrong = f"{path} is no grid ({type(error).__name__}: {error})"
        raise UsageError(f"grid: {wrong}; expected YAML like eval/bench/bench.yaml") from error


def _cells(entry: Mapping[str, Any], data: Mapping[str, Any]) -> list[Cell]:
    values = {**data["defaults"], **data.get("shapes", {}).get(entry.get("shape"), {}), **entry}
    values.pop("shape", None)
    dtypes = values.pop("dtypes")
    expected = {field.name for field in fields(Cell)}
    unknown = sorted(set(values) - expected)
    if unknown:
        raise UsageError(
            f"cell {entry.get('name')!r}: got the keys {', '.join(unknown)}, expected some of "
            f"{', '.join(sorted(expected))}"
        )
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return [Cell(dtype=dtype, **values) for dtype in dtypes]
