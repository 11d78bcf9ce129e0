"""Errors with their exit codes, the one sentence for a name that nobody knows, and warnings at the user's line."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable

EXIT_CODES: dict[int, str] = {
    0: "done; every bound that was asked for is kept",
    1: "measured, but a bound that was asked for (--max-delta-nll, --max-ppl-ratio) is broken",
    2: "usage: an argument is wrong, or two contradict each other",
    3: "data unavailable: the corpus is neither local, nor cached, nor to be downloaded, or cannot be read",
    4: "model unavailable: no such checkpoint, no tokenizer, no output head, or no such attention",
    5: "the output directory belongs to another run (the reason names what differs)",
    6: "out of memory: what would fit is said; finished work is kept and --resume continues it",
    130: "interrupted; finished work is kept and --resume continues it",
}
"""Exit code of `adaattn eval` to its meaning."""


class EvalError(Exception):
    """An evaluation that cannot go on; `exit_code` says which kind (see `EXIT_CODES`)."""

    exit_code = 2


class UsageError(EvalError, ValueError):
    """An argument is wrong."""

    exit_code = 2


class DataUnavailable(EvalError):
    """The corpus cannot be had."""

    exit_code = 3


class ModelUnavailable(EvalError):
    """The model, its tokenizer or the attention that was asked for cannot be had."""

    exit_code = 4


class OutOfMemory(EvalError):
    """The device, or the machine, has no room for what was asked."""

    exit_code = 6


class JournalMismatch(EvalError):
    """The output directory holds the work of another run."""

    exit_code = 5


def unknown(argument: str, got: str, known: Iterable[str], remedy: str = "") -> str:
    """The sentence for an unknown name: what came, the nearest known one, and all known ones."""
    names = sorted(known)
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    tail = f" {remedy}" if remedy else ""
    return f"{argument}: got {got!r}, expected one of {', '.join(names)}.{hint}{tail}"


_BETWEEN = {"adaattn_hf", "contextlib", "importlib", "torch", "transformers"}
"""Packages that lie between a user's line and what we warn of."""


def warn(sentence: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's that led here, through whatever libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    names = frame.f_globals
    seen = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(sentence, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), seen)


def from_environment(variable: str, known: Iterable[str], default: str) -> str:
    """The value of an environment variable, `default` where it is not set or empty.

    Raises:
        UsageError: It is neither the default nor one of the known values.
    """
    asked = os.environ.get(variable) or default
    if asked != default and asked not in known:
        raise UsageError(unknown(variable, asked, known))
    return asked
