"""The record of a run on disk, one line per finished batch: an interrupted run goes on where it stood.

The first line names what is measured (the *fingerprint*: weights, data, settings). Every later line is a batch with its
numbers and a checksum. A line is written in one piece and synced; a torn last line, from a machine that died in the
middle of it, fails its checksum and is measured again. A report of a resumed run is that of an uninterrupted one to the
last bit.
"""

import errno
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from adaattn_hf.errors import JournalMismatch
from adaattn_hf.stats.paired import TokenScores
from adaattn_hf.stats.stopwatch import Elapsed

VERSION = 2
NAME = "journal.jsonl"
Counts = tuple[int, int]
"""(token, head) pairs of attention calls, and those of them that were not exact."""
_ARRAYS = {"nll": np.float64, "kl": np.float64, "hit": np.bool_, "agree": np.bool_}
"""Arrays of `TokenScores`; JSON gives every number back to the last bit."""


@dataclass(frozen=True)
class BatchRecord:
    """What is kept of one batch: scores, and per arm what it took and what was not exact."""

    scores: TokenScores
    elapsed: tuple[Elapsed, ...]
    activation: tuple[Counts | None, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            **{key: getattr(self.scores, key).tolist() for key in _ARRAYS},
            "wall": [e.wall for e in self.elapsed],
            "process": [e.process for e in self.elapsed],
            "activation": self.activation,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The record of JSON values."""
        scores = TokenScores(**{key: np.asarray(value[key], kind) for key, kind in _ARRAYS.items()})
        elapsed = tuple(Elapsed(w, p) for w, p in zip(value["wall"], value["process"], strict=True))
        return cls(scores, elapsed, tuple(c and (c[0], c[1]) for c in value["activation"]))


def _locked(descriptor: int) -> bool:
    """Whether a file is this process's alone until it is closed; where nothing can lock it, nobody can tell."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a network's disk
            raise
    return True


class Journal:
    """Records of finished batches, kept in an append-only file where there is a directory for one."""

    def __init__(self, directory: Path | None, fingerprint: Mapping[str, Any], *, resume: bool = False) -> None:
        """Open or begin the journal of a directory; None for a run that is too short to be interrupted.

        JournalMismatch: it holds another run by the fingerprint, or one that was not asked to be continued (`resume`).
        """
        self.records: dict[int, BatchRecord] = {}
        self._file: BinaryIO | None = None
        if directory is None:
            return
        self.path = directory / NAME
        # as JSON keeps it, so that it can be compared with what was read
        heading = json.loads(json.dumps({"version": VERSION, "fingerprint": dict(fingerprint)}))
        directory.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            if not _locked(self._file.fileno()):
                raise JournalMismatch(
                    f"output_dir: {self.path} is being written by another process; wait for it, or pass another "
                    "--output-dir"
                )
            line = _line(heading)
            with self.path.open("rb") as file:
                begun = file.read(len(line))
            if begun != line and line.startswith(begun):  # nothing, or less than a line: the disk was full
                os.truncate(self.path, 0)
                self._file.write(line)
                self._file.flush()
            elif resume:
                self._read(heading)
            else:
                raise JournalMismatch(
                    f"output_dir: {self.path} is already there; pass --resume to go on with it, or another --output-dir"
                )
        except BaseException:
            self._file.close()
            raise

    def _read(self, heading: Mapping[str, Any]) -> None:
        good = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file):
                value = _parse(raw)
                if value is None:
                    break
                good += len(raw)
                if number == 0:
                    theirs, ours = (
                        {"version": one.get("version"), **one.get("fingerprint", {})} for one in (value, heading)
                    )
                    differing = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
                    shown = "; ".join(
                        f"{key}: there {theirs.get(key)!r}, now {ours.get(key)!r}" for key in differing[:4]
                    )
                    if differing:
                        raise JournalMismatch(
                            f"output_dir: {self.path} belongs to another run ({shown}). Its numbers cannot be mixed "
                            "with this one's; pass another --output-dir, or delete that file to begin again"
                        )
                    continue
                try:
                    if value["batch"] in self.records:
                        raise ValueError("a batch that is there twice")
                    self.records[value["batch"]] = BatchRecord.from_json(value)
                except (LookupError, TypeError, ValueError) as error:
                    raise JournalMismatch(
                        f"output_dir: line {number + 1} of {self.path} was not written by this program; delete it and "
                        "all lines behind to keep the batches before, or the file to begin again"
                    ) from error
        if good == 0:
            raise JournalMismatch(f"output_dir: {self.path} is no journal of this program; pass another --output-dir")
        os.truncate(self.path, good)  # a torn last line is measured again

    def append(self, batch: int, record: BatchRecord) -> None:
        """Keep one finished batch: where there is a file, it is on disk when this returns."""
        if self._file is not None:
            self._file.write(_line({"batch": batch, **record.to_json()}))
            self._file.flush()
            os.fsync(self._file.fileno())
        self.records[batch] = record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _line(value: Mapping[str, Any]) -> bytes:
    body = json.dumps(value, separators=(",", ":"), sort_keys=True).encode("utf-8")
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(raw: bytes) -> dict[str, Any] | None:
    head, _, body = raw.rstrip(b"\n").partition(b" ")
    if not raw.endswith(b"\n") or head != b"%08x" % zlib.crc32(body):
        return None
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
