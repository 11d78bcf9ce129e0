"""Reads plans from files: an `adaattn_plan.json`, or the `config.json` of a model that carries one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._files import parse_json
from .plan import CONFIG_KEY, Plan, PlanError

MOST_BYTES = 1 << 24
"""Largest size of a plan file."""
PLAN_FILE = "adaattn_plan.json"


def read_plan(path: str | Path) -> Plan:
    """Returns the plan in a JSON file, or in the `adaattn_plan.json` or `config.json` of a model directory.

    Raises:
        PlanError: If there is none.
    """
    file = Path(path)
    if file.is_dir():
        own = file / PLAN_FILE
        file = own if own.is_file() else file / "config.json"
    if not file.is_file():
        raise PlanError(
            f"{file} does not exist; expected a plan, or a directory that `adaattn calibrate` wrote"
        )
    if file.name != "config.json":
        try:
            return Plan.from_json(text_file(file))
        except PlanError as error:
            raise PlanError(
                f"{file}: {error}; expected the adaattn_plan.json of `adaattn calibrate`"
            ) from error
    data = _settings_of(file).get(CONFIG_KEY)
    if data is None:
        raise PlanError(f"{file} carries no plan; make one with `adaattn calibrate`")
    return Plan.from_dict(data)


def holds_plan(path: Path) -> bool:
    """Whether a file or directory holds a plan, and not only bases and means."""
    if path.is_file() or (path / PLAN_FILE).is_file():
        return True
    config = path / "config.json"
    if not config.is_file():
        return False
    return CONFIG_KEY in _settings_of(config)


def text_file(file: Path) -> str:
    """Returns the text of a plan or report.

    Raises:
        PlanError: If it cannot be read, is too large, or is not text.
    """
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise PlanError(f"{file} has {size} bytes, expected a plan of at most {MOST_BYTES}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{file} cannot be read ({error.strerror}); give a plan that can") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{file} is no UTF-8 text: {error}; expected a plan as JSON") from error


def _settings_of(config: Path) -> Mapping[str, Any]:
    """Returns this package's settings in a model's `config.json`.

    Raises:
        PlanError: If the file is not a configuration.
    """
    try:
        data = parse_json(text_file(config))
    except ValueError as error:
        raise PlanError(f"{config} is not JSON: {error}") from error
    settings = data.get("adaattn") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(settings, Mapping | None):
        raise PlanError(f"{config} is no model configuration, expected an object whose adaattn is one, too")
    return settings or {}
