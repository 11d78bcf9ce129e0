"""Measured risks: saved after every sequence, so that an interrupted run can resume, and kept with the plan."""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from .._files import parse_json, write_atomically
from ..policy.candidates import Candidates
from ..policy.knapsack import Array

FILE = "adaattn_calibration.partial.npz"
RISKS_FILE = "adaattn_risks.npz"
_PARTS = ("total", "dropped", "needles")
"""What the file calls the sums at a length."""
_BROKEN = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, AttributeError, IndexError, KeyError, TypeError, ValueError,
)  # fmt: skip
"""Errors that reading a damaged or foreign file raises."""


def _arrays(path: Path) -> dict[str, Any]:
    # opened here, because numpy leaves a file open that it cannot read
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


_SAME = {
    "dtype": ("in {}", "{}, as the model is loaded; give --dtype {}"),
    "weights": ("of other weights", "those of the model that is calibrated; name that model"),
    "scoring": ("of other predictions", "the same mask_share and maskings; give those of that run"),
    "lengths": ("at {} tokens", "{}; give the --lengths of that run"),
    "tokens": (
        "of other text",
        "that of --data: no plan is verified on text that risks saw; give the --data of that run",
    ),
}
"""What risks must have in common with a run that takes them, and what is said where they have not."""


class CalibrationState:
    """Risks and dropped masses by length: `identity` is of what they were measured of and how, as JSON data.

    Those of an earlier run on the same weights and text (`read`) have the `path` of their file.
    """

    path: Path | None = None

    def __init__(self, identity: Mapping[str, Any], lengths: Sequence[int], units: int, choices: int) -> None:
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        # `[units, choices]`, summed over labels and sampled rows, of 1/2 (g . do)^2, see `fisher`; and how many rows
        self.total = {length: np.zeros((units, choices)) for length in lengths}
        self.rows = dict.fromkeys(lengths, 0)
        # `[units, choices, 3]` sums over sequences of mean, 95th percentile and mean square
        self.dropped = {length: np.zeros((units, choices, 3)) for length in lengths}
        self.needles = {length: np.zeros((units, choices)) for length in lengths}  # risks for retrieval
        self.done = dict.fromkeys(lengths, 0)  # sequences finished
        self.prices: list[Any] = []  # the conditions that they were measured under, then their table as JSON
        self.finished: dict[str, int] = {}  # budgets whose plans are stored, by directory, with their exit codes

    def save(self, directory: Path, file: str = FILE) -> None:
        """Writes the state to a directory."""
        arrays: dict[str, Any] = {
            "identity": np.array(json.dumps(self.identity, sort_keys=True)),
            "run": np.array(json.dumps([self.prices, self.finished])),
        }
        for length in self.total:
            arrays |= {f"{name}.{length}": part for name, part in zip(_PARTS, self.parts(length), strict=True)}
            arrays[f"counts.{length}"] = np.array([self.rows[length], self.done[length]])
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        write_atomically(directory / file, buffer.getvalue())

    def parts(self, length: int) -> tuple[Array, Array, Array]:
        """Returns the sums at a length: of risks, of dropped mass, and of risks for retrieval."""
        return self.total[length], self.dropped[length], self.needles[length]

    def add(self, length: int, rows: int, *parts: Array) -> None:
        """Adds the `parts` of further sequences; risks are finite, and at least 0."""
        if not np.isfinite(parts[0]).all() or (parts[0] < 0).any():
            raise ValueError(
                "summed holds a negative or non-finite risk, expected finite ones: the model's losses or gradients are "
                "not finite on this text; load it in bfloat16 or float32"
            )
        self.rows[length] += rows
        for total, part in zip(self.parts(length), parts, strict=True):
            total += part.reshape(total.shape)

    def mean(self, length: int) -> Array:
        """Returns the risks `[units, choices]` at a length, in nats/token."""
        return np.asarray(self.total[length] / self.rows[length])

    def fill(self, arrays: Mapping[str, Any]) -> None:
        """Takes the numbers of a file, as the first of this state."""
        for length in self.total:
            rows, self.done[length] = (int(n) for n in arrays[f"counts.{length}"])
            self.add(length, rows, *(arrays[f"{name}.{length}"] for name in _PARTS))
        self.prices, self.finished = json.loads(str(arrays["run"]))

    def load(self, directory: Path) -> bool:
        """Reads the saved state; returns whether there was one. A broken one, or another calibration's, is refused."""
        path = directory / FILE
        if not path.is_file():
            return False
        try:
            arrays = _arrays(path)
            if parse_json(str(arrays["identity"])) == self.identity:
                self.fill(arrays)
                return True
        except _BROKEN as error:
            raise ValueError(
                f"resume: {path} is no whole state of a calibration; delete it, and the same command begins anew"
            ) from error
        raise ValueError(
            f"resume: {path} belongs to another model, text or settings; give the arguments of the interrupted run, or "
            "another --output-dir"
        )

    @classmethod
    def read(cls, place: Path) -> Self:
        """Reads the risks kept with a plan, which is given by its directory or its file; a ValueError if it cannot."""
        path = (place if place.is_dir() else place.parent) / RISKS_FILE
        if not path.is_file():
            raise ValueError(
                f"from: {path} does not exist, expected the directory of a plan with its measured risks, "
                "as adaattn calibrate writes them; leave --from out to measure them"
            )
        try:
            arrays = _arrays(path)
            identity = parse_json(str(arrays["identity"]))
            lengths = identity["lengths"]
            state = cls(identity, lengths, len(arrays[f"total.{lengths[0]}"]), len(identity["choices"]))
            state.path = path
            state.fill(arrays)
            if set(state.done.values()) != {state.settings["sequences"]}:
                raise ValueError(f"{state.done} of {state.settings['sequences']} sequences")
            return state
        except _BROKEN as error:
            raise ValueError(
                f"from: {path} holds no risks as this version writes them ({error}); leave --from out to measure them"
            ) from error

    @property
    def settings(self) -> dict[str, int]:
        """How the risks were measured: settings that do not have to be given again."""
        return {name: int(self.identity[name]) for name in ("seed", "sequences", "rows", "labels")}

    def choices(self, offered: Candidates, identity: Mapping[str, Any]) -> Candidates:
        """Returns the candidates whose risks are known, at least one that is not exact.

        Risks of other weights, lengths or text, or of another dtype, are refused.
        """
        for name, (wrong, expected) in _SAME.items():
            theirs, ours = self.identity.get(name), json.loads(json.dumps(identity[name]))
            if theirs != ours:
                instead = expected.format(ours, theirs)
                raise ValueError(
                    f"from: {self.path} holds risks {wrong.format(theirs)}, expected {instead}, or leave --from out"
                )
        measured = offered.among(self.identity["choices"])
        if len(measured.choices) == 1:
            labels = ", ".join(choice.label for choice in offered.choices[1:])
            raise ValueError(
                f"from: {self.path} holds risks of {', '.join(self.identity['choices'][1:])}, expected some of "
                f"{labels}; ask for those --families, or leave --from out"
            )
        return measured

    def take(self, earlier: Self, choices: Sequence[str]) -> None:
        """Takes the risks of an earlier run, of choices that it measured."""
        places = [earlier.identity["choices"].index(label) for label in choices]
        for length in self.total:
            self.add(length, earlier.rows[length], *(part[:, places] for part in earlier.parts(length)))
            self.done[length] = earlier.done[length]


def kept_in(directory: Path) -> Path | None:
    """Returns the file that an interrupted calibration has kept, None where there is none."""
    return path if (path := directory / FILE).is_file() else None


def forget(directory: Path) -> None:
    """Removes what is kept of a calibration whose plan is written."""
    (directory / FILE).unlink(missing_ok=True)
