"""Validates untrusted JSON records: known keys, right types, values in range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from ..errors import unknown

LARGEST = 2**31 - 1
"""Largest integer in a plan, so that lengths, windows and indices do not overflow the kernels' integers."""

GREATEST = 1e12
"""Largest number in a plan, in nats, seconds or shares: sums and ratios of such numbers stay finite."""

LONGEST = 4096
"""Most characters of a text in a plan: hashes, versions and names, which messages repeat, and sentences."""

Record = TypeVar("Record")


class PlanError(ValueError):
    """A plan is malformed, or does not belong to the model."""


def read_record(cls: type[Record], data: Any, where: str) -> dict[str, Any]:
    """Returns `data` as keyword arguments for the dataclass; PlanError if it is no mapping, or has other keys."""
    if not isinstance(data, Mapping):
        raise PlanError(
            f"{where} is {type(data).__name__}, expected a mapping of {cls.__name__} fields; calibrate again"
        )
    return checked_keys({field.name for field in fields(cls)}, data, where)  # type: ignore[arg-type]


def checked_keys(known: set[str], data: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Returns the mapping as a dictionary if it has exactly the known keys, else PlanError."""
    for name in data:
        if name not in known:
            raise PlanError(unknown(f"key of {where}", str(name), known))
    missing = sorted(known - set(data))
    if missing:
        raise PlanError(f"{where} lacks the keys {missing}; write the plan again with `adaattn calibrate`")
    return dict(data)


def read_list(data: Any, where: str, most: int) -> list[Any]:
    """Returns a JSON list of at most so many entries. Raises PlanError if it is not a list, or longer."""
    if not isinstance(data, (list, tuple)):
        raise PlanError(f"{where} is {type(data).__name__}, expected a list")
    if len(data) > most:
        raise PlanError(f"{where} has {len(data)} entries, expected at most {most}")
    return list(data)


def whole(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """Returns an integer within bounds. Raises PlanError if it is not one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{name} is {value!r:.60}, expected an integer of at least {least}")
    if not least <= value <= most:
        raise PlanError(f"{name} is {_short(value)}, expected an integer from {least} to {most}")
    return value


def real(value: Any, name: str, least: float = -GREATEST, most: float = GREATEST) -> float:
    """Returns a number within bounds, all of which are finite. Raises PlanError if it is not one."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise PlanError(f"{name} is {value!r:.60}, expected a number")
    if not least <= value <= most:  # compares integers of any size, and no NaN passes
        raise PlanError(f"{name} is {_short(value)}, expected a number from {least:g} to {most:g}")
    return value


def share(value: Any, name: str) -> float:
    """Returns a share of a whole. Raises PlanError if it is none."""
    return real(value, name, 0.0, 1.0)


def _short(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.60}"


def text(value: Any, name: str) -> str:
    """Returns a string that can be written as UTF-8. Raises PlanError if it is not one."""
    if not isinstance(value, str):
        raise PlanError(f"{name} is {value!r:.60}, expected a string")
    if len(value) > LONGEST:
        raise PlanError(f"{name} has {len(value)} characters, expected at most {LONGEST}; it begins {value!r:.60}")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise PlanError(f"{name} holds half of a character (a lone surrogate), expected text")
    return value
