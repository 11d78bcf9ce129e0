"""Reads untrusted JSON as records: dataclasses whose annotations say which types, ranges and sizes their fields have.

A number may be `Annotated` with its least and largest value, a tuple is with its most entries. A record calls
`read_fields` when it is made, so that one made in Python is checked like one read from a file.
"""

from collections.abc import Mapping, Set
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

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


def read_record(cls: type[Record], data: Any) -> Record:
    """Returns a record from JSON data; PlanError for other data. Fields with a default may be absent."""
    if not isinstance(data, Mapping):
        raise PlanError(f"got {type(data).__name__}, expected a mapping of {cls.__name__} fields; calibrate again")
    declared: Any = fields(cls)  # type: ignore[arg-type]
    optional = {field.name for field in declared if field.default is not MISSING}
    return cls(**checked_keys({field.name for field in declared}, data, optional))


def checked_keys(names: Set[str], data: Mapping[Any, Any], optional: Set[str] = frozenset()) -> dict[str, Any]:
    """Returns the mapping as a dictionary if it has these keys and no other, else PlanError."""
    for name in data:
        if name not in names:
            raise PlanError(unknown("key", str(name), names))
    missing = sorted(names - optional - data.keys())
    if missing:
        raise PlanError(f"the data lacks the keys {missing}; write the plan again with `adaattn calibrate`")
    return dict(data)


def read_fields(record: Any) -> None:
    """Reads the fields of a new record as they are annotated; PlanError names the one that is something else."""
    cls: Any = type(record)
    for name, kind in _kinds(cls).items():
        object.__setattr__(record, name, read(getattr(record, name), kind, name))


@cache
def _kinds(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def read(value: Any, kind: Any, name: str) -> Any:
    """Returns JSON data as a value of an annotated kind. PlanError, which begins with its `name`: it is none."""
    kind, bounds = get_args(kind)[:2] if get_origin(kind) is Annotated else (kind, ())
    inner = get_args(kind)
    if type(None) in inner:
        return None if value is None else read(value, inner[0], name)
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise PlanError(f"{name} is {type(value).__name__}, expected a list")
        if len(value) > bounds:
            raise PlanError(f"{name} has {len(value)} entries, expected at most {bounds}")
        return tuple(read(item, inner[0], f"{name}[{index}]") for index, item in enumerate(value))
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            raise PlanError(f"{name} is {type(value).__name__}, expected a mapping")
    elif is_dataclass(kind):
        record: Any = kind
        if not isinstance(value, record):
            try:
                return record.from_dict(value) if hasattr(record, "from_dict") else read_record(record, value)
            except PlanError as error:
                raise PlanError(f"{name}: {error}") from error
    elif kind is int:
        whole(value, name, *bounds)
    elif kind is float:
        least, most = bounds or (-GREATEST, GREATEST)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise PlanError(f"{name} is {value!r:.60}, expected a number")
        if not least <= value <= most:  # compares integers of any size, and no NaN passes
            raise PlanError(f"{name} is {_short(value)}, expected a number from {least:g} to {most:g}")
    elif not isinstance(value, kind):
        raise PlanError(f"{name} is {value!r:.60}, expected {'a string' if kind is str else 'true or false'}")
    elif kind is str and len(value) > LONGEST:
        raise PlanError(f"{name} has {len(value)} characters, expected at most {LONGEST}; it begins {value!r:.60}")
    elif kind is str and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise PlanError(f"{name} holds half of a character (a lone surrogate), expected text")
    return value


def whole(value: Any, name: str, least: int = 0, most: int = LARGEST) -> int:
    """Returns an integer within bounds. Raises PlanError if it is not one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{name} is {value!r:.60}, expected an integer of at least {least}")
    if not least <= value <= most:
        raise PlanError(f"{name} is {_short(value)}, expected an integer from {least} to {most}")
    return value


def _short(value: Any) -> str:
    huge = isinstance(value, int) and abs(value) > 1 << 64  # Python writes no integer of more than 4,300 digits
    return f"an integer of {value.bit_length()} bits" if huge else f"{value!r:.60}"
