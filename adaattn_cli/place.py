"""Reads budgets, and finds the directories of plans: none is written into a model unasked, or over another's plan."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaattn_hf.errors import UsageError
from adaattn_hf.patches.plans.configured import other_model
from adaattn_hf.patches.plans.hashes import model_hash
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import PLAN_FILE
from adaattn_hf.plans.wording import allowed

from .options import DEMO_DIRECTORY, PLAN_DIRECTORY, Options
from .pictures.headline import name_of

UNITLESS = 0.01
"""A bare number from here on may be meant in percent, and is refused."""
_BUDGET = re.compile(r"\s*(.*?)\s*(%|nats/token|nats|)\s*", re.DOTALL)
"""A number and its unit."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def nats(budget: str) -> float:
    """Returns a budget in nats/token: `0.1%` is ln 1.001, `1e-3` or `1e-3nats` itself; ValueError for others."""
    number, unit = _BUDGET.fullmatch(budget).groups()  # type: ignore[union-attr]
    try:
        value = math.log1p(float(number) / 100.0) if unit == "%" else float(number)
    except ValueError as error:
        raise ValueError(
            f"budget is {budget!r}, expected a rise of the perplexity such as 0.1% or a loss in nats/token such as 1e-3"
        ) from error
    if not unit and UNITLESS <= value < 1.0:
        raise ValueError(
            f"budget is {budget!r}, expected a unit: write {number}% (a rise of the perplexity by {number} %) or "
            f"{number}nats (nats/token, a rise by {allowed(value).lstrip('+')})?"
        )
    if not 0.0 < value < 1.0:
        raise ValueError(
            f"budget is {budget!r}, expected more than 0 and less than 1 nat/token; a rise of the perplexity has a %, "
            "such as 1%"
        )
    return value


def folders(budgets: Sequence[str]) -> list[str]:
    """Returns the directory names of budgets, `0.1pct`, `0.001nats`; ValueError if one is none, or is named twice."""
    names: list[str] = []
    for text in budgets:
        nats(text)  # refuses what is none
        number, unit = _BUDGET.fullmatch(text).groups()  # type: ignore[union-attr]
        names.append(f"{float(number):g}{'pct' if unit == '%' else 'nats'}")
        if names[-1] in names[:-1]:
            raise ValueError(f"budget is {', '.join(budgets)}, expected each once; leave the second {text} out")
    return names


def default_plan() -> Path:
    """Returns the directory that plans are read from where none is named; UsageError if it holds none."""
    if not any(Path(PLAN_DIRECTORY).rglob(PLAN_FILE)):
        raise UsageError(f"plan: no plan in {PLAN_DIRECTORY}; run `adaattn calibrate MODEL`, or name another directory")
    return Path(PLAN_DIRECTORY)


def directory(options: Options, inside: str = "") -> Path:
    """Returns the directory that `adaattn calibrate` writes to, or one `inside` of it.

    UsageError for the model's own without `--in-place`, or one that must stay as it is.
    """
    model, target = options.model, options.output_dir
    checkpoint = None if model is None or not Path(model).is_dir() else Path(model)
    if not options.in_place:
        target = (target or Path(DEMO_DIRECTORY if model is None else PLAN_DIRECTORY)) / inside
        if checkpoint is not None and os.path.realpath(target) == os.path.realpath(checkpoint):
            raise UsageError(
                f"output_dir: {target} is the model's own directory, expected one for the plan alone; give "
                "--in-place to write into the model"
            )
        _refuse_checkpoint(target)
        _refuse_kept(target, "output_dir", "give another directory")
        return target
    if target is not None:
        raise UsageError(f"in_place: got --output-dir {target}, too, expected one of them; leave one out")
    if checkpoint is None:
        raise UsageError(
            f"in_place: got {model or 'the packaged model'}, expected the directory of a model that is yours: what "
            "comes from the hub or with the package is never written to; leave --in-place out, and run the plan "
            "with adaattn_hf.load_plan(model, DIRECTORY)"
        )
    _refuse_kept(checkpoint, "in_place", "copy the model to a directory of your own, or leave --in-place out")
    return checkpoint


def directories(options: Options) -> list[Path]:
    """Returns the directory of each budget's plan: of several in subdirectories; raises as `directory`."""
    names, target = folders(options.budget), directory(options)
    if len(names) < 2:
        return [target]
    if options.in_place:
        raise UsageError(
            f"in_place: got {len(names)} budgets, expected one, since a model carries one plan; leave --in-place "
            "out, and each plan gets a directory of its own"
        )
    return [directory(options, name) for name in names]


def _refuse_kept(target: Path, argument: str, remedy: str) -> None:
    whole = Path(os.path.realpath(target))  # of a link that leads to itself, too
    if whole.parent.name == "snapshots" and (whole.parents[1] / "blobs").is_dir():
        raise UsageError(
            f"{argument}: {target} lies in the cache of the hub, which all programs of this machine read and which is "
            f"never written to; {remedy}"
        )
    for file in sorted([target / "config.json", *target.glob("adaattn_*")]):
        if file.is_symlink():
            raise UsageError(
                f"{argument}: {file} is a link to {file.readlink()}, expected a file of the directory's own; {remedy}"
            )
        if file.is_file() and not file.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(f"{argument}: {file} is read-only, expected a file that may be replaced; {remedy}")


def _refuse_checkpoint(target: Path) -> None:
    names = [file.name for kind in WEIGHTS for file in sorted(target.glob(kind))]
    weights = [name for name in names if not name.startswith("adaattn_")]
    if weights or ((target / "config.json").is_file() and not (target / PLAN_FILE).is_file()):
        raise UsageError(
            f"output_dir: {target} holds {weights[0] if weights else 'config.json'} of a model, whose config.json "
            f"would be overwritten, expected a directory for the plan alone; give another one, {PLAN_DIRECTORY} say"
        )


def refuse_other_plan(target: Path, config: Any, model: Any = None) -> None:
    """Refuses a directory that holds another model's plan, by its configuration or, once loaded, by its weights."""
    if not (target / PLAN_FILE).is_file():
        return
    remedy = f"give another directory (--output-dir), or delete {target}"
    try:
        plan = Plan.from_pretrained(target)
    except PlanError as error:
        raise UsageError(f"output_dir: {target} holds a plan that cannot be read: {error}; {remedy}") from error
    other = min((other_model(plan, one) or "" for one in (config, config.get_text_config())), key=len)
    if not other and model is not None and plan.weight_hash != model_hash(model):
        differs = "other weights" if str(model.dtype) == f"torch.{plan.dtype}" else f"in {plan.dtype}"
        other = f"a plan of {name_of(plan)} ({differs})"
    if other:
        raise UsageError(
            f"output_dir: {target} holds {other}, expected none, or one of the model that is calibrated; {remedy}"
        )
