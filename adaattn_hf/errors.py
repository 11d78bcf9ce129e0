"""Errors with their exit codes, the sentence for a name that nobody knows, warnings, and what is said once."""

import difflib
import logging
import os
import sys
import warnings
from collections.abc import Iterable

logger = logging.getLogger("adaattn_hf")


class EvalError(Exception):
    """A command that cannot go on; `exit_code` says which kind, as its help does."""

    exit_code = 2


class UsageError(EvalError, ValueError):
    """An argument is wrong."""


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


CPU_ALLOCATOR = "DefaultCPUAllocator"
_FULL = (CPU_ALLOCATOR, "out of memory", "STATUS_ALLOC_FAILED")
"""Words in the plain `RuntimeError` that torch raises where the machine, or a library of CUDA's, has no memory left."""


def memory_is_full(error: Exception) -> bool:
    """Whether an error says that the device, or the machine, has no memory left."""
    words = " ".join(str(error).split())
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(one in words for one in _FULL))


def unknown(argument: str, got: str, known: Iterable[str]) -> str:
    """The sentence for an unknown name: what came, the nearest known one, and all known ones."""
    names = sorted(known)
    near = nearest(got, names)
    hint = f" Did you mean {near!r}?" if near else ""
    return f"{argument}: got {got!r:.80}, expected one of {', '.join(names)}.{hint}"


def nearest(got: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The known name that is most like another one; empty if none is."""
    return "".join(difflib.get_close_matches(got, list(known), n=1, cutoff=cutoff))


_said: set[tuple[object, ...]] = set()


def is_news(*facts: object) -> bool:
    """Whether nobody asked this of these facts before: what is said of them is said once."""
    news = facts not in _said
    _said.add(facts)
    return news


_BETWEEN = {"adaattn_hf", "contextlib", "importlib", "torch", "transformers"}
"""Packages that lie between a user's line and what we warn of."""


def warn(sentence: str) -> None:
    """Warns at the line of the user's that led here, through whatever libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    names = frame.f_globals
    seen = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(sentence, UserWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), seen)


def from_environment(variable: str, known: Iterable[str], default: str) -> str:
    """The value of an environment variable, `default` where it is not set or empty; UsageError for an unknown one."""
    asked = os.environ.get(variable) or default
    if asked != default and asked not in known:
        raise UsageError(unknown(variable, asked, known))
    return asked
