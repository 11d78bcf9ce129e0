"""Measured risks, saved after every sequence so that an interrupted calibration can resume."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._files import write_atomically
from ..policy.risk import RiskTable

FILE = "adaattn_calibration.partial.npz"
_NO_ARRAYS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors that reading a damaged or foreign file raises."""


class CalibrationState:
    """Risks and dropped masses by length bin.

    Attributes:
        key: Hash of what the numbers belong to: version, settings, weights and tokens.
        risks: By length, the risk table of all choices.
        dropped: By length, `[units, choices, 3]` sums over sequences of mean, 95th percentile and mean
            square.
        done: By length, sequences finished.
        finished: Budgets whose plans are stored, by the names of their directories, with their exit codes.
    """

    def __init__(self, identity: Mapping[str, Any], lengths: tuple[int, ...], units: int, choices: int) -> None:
        self.key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()
        self.risks = {length: RiskTable(units, choices) for length in lengths}
        self.dropped = {length: np.zeros((units, choices, 3)) for length in lengths}
        self.done = dict.fromkeys(lengths, 0)
        self.finished: dict[str, int] = {}

    def save(self, directory: Path) -> None:
        """Writes the state to a directory."""
        arrays: dict[str, Any] = {"key": np.array(self.key), "finished": np.array(json.dumps(self.finished))}
        for length, table in self.risks.items():
            arrays[f"total.{length}"] = table.total
            arrays[f"dropped.{length}"] = self.dropped[length]
            arrays[f"counts.{length}"] = np.array([table.rows, self.done[length]])
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomically(directory / FILE, buffer.getvalue())

    def load(self, directory: Path) -> bool:
        """Reads the saved state; returns whether there was one.

        Raises:
            ValueError: If the state belongs to another calibration, or cannot be read.
        """
        path = directory / FILE
        if not path.is_file():
            return False
        try:
            # opened here, because numpy leaves a file open that it cannot read
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            if str(arrays["key"]) == self.key:
                for length, table in self.risks.items():
                    table.total = arrays[f"total.{length}"]
                    self.dropped[length] = arrays[f"dropped.{length}"]
                    table.rows, self.done[length] = (int(n) for n in arrays[f"counts.{length}"])
                self.finished = json.loads(str(arrays["finished"]))
                return True
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, *_NO_ARRAYS) as error:
            raise ValueError(
                f"resume: {path} is no whole state of a calibration; delete it, and the same command begins anew"
            ) from error
        raise ValueError(
            f"resume: {path} belongs to another model, text or settings; give the arguments of the interrupted run, or "
            "another --output-dir"
        )

    @staticmethod
    def forget(directory: Path) -> None:
        """Removes the state of a calibration whose plan is written."""
        (directory / FILE).unlink(missing_ok=True)


def refuse_interrupted(directory: Path) -> None:
    """Refuses to start where an interrupted calibration would be overwritten.

    Raises:
        ValueError: If the directory holds one.
    """
    path = directory / FILE
    if path.is_file():
        raise ValueError(
            f"out: {path} is an interrupted calibration; pass --resume to go on with it, delete it to begin anew, or "
            "give another --output-dir"
        )
