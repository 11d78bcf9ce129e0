"""Stores what a calibration found for one budget, and shows it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.calibration.assemble import save_plan
from adaattn_hf.calibration.layers import Measurement
from adaattn_hf.calibration.passes import Benefit
from adaattn_hf.calibration.settings import Calibration, CalibrationSettings
from adaattn_hf.calibration.state import RISKS_FILE
from adaattn_hf.eval.progress import tell
from adaattn_hf.patches.plans.attach import remove_plan
from adaattn_hf.patches.plans.subject import longest_input
from adaattn_hf.plans.limits import unproven
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import PLAN_FILE

from .job import Job
from .pictures.grid import print_plan
from .pictures.headline import PLAN_HASH, REPORT_FILE, Bought, digest
from .pictures.page import plan_page

Show = Callable[[], None]
"""Shows the plan of a budget."""
FAILED_FILE = "adaattn_failed.json"
BUDGET_NOT_MET = 4
"""Exit code when the budget cannot be met and the plan is exact."""


def store(job: Job, measurement: Measurement, result: Calibration, console: Console) -> tuple[dict[str, Any], Show]:
    """Writes the plan of one budget with its report and risks; returns it as JSON, and a function that shows it."""
    plan = result.plan.to_json()
    prices = result.report.pop("prices")
    report = json_text({**result.report, PLAN_HASH: digest(plan.encode())}, indent=1, sort_keys=True)
    results = {"plan": json.loads(plan), "report": json.loads(report)}
    if not result.met and any(one.weight_hash == result.plan.weight_hash for one in proven_in(job.target, "")):
        failed = job.target / FAILED_FILE
        write_atomically(failed, json_text(results, indent=1, sort_keys=True) + "\n")
        kept = f"kept: the plan in {job.target}, which was verified before"
        return results, partial(_tell_all, console, [result.sentence, kept, f"report: {failed}"])
    write_atomically(job.target / "adaattn_prices.json", prices)
    write_atomically(job.target / REPORT_FILE, report + "\n")
    buys = Bought.of(json.loads(report))
    picture = job.target / "adaattn_plan.html"
    write_atomically(picture, plan_page(result.plan, buys))
    measurement.state.save(job.target, RISKS_FILE)
    model = measurement.inputs.arms.model
    save_plan(model, result, job.target)
    (job.target / FAILED_FILE).unlink(missing_ok=True)
    remove_plan(model)  # what follows is measured beside exact attention
    passes = [Benefit(**one) for one in result.report.get("whole_forward", [])]
    uses = [
        f"use: adaattn_hf.load_plan(model, {str(job.target)!r})",
        f"compare with stock attention: {evaluation(job, result.plan.dtype)}",
    ]
    lines = [
        *([result.report["cache"]] if result.met and "cache" in result.report else []),
        f"plan: {job.target}",
        *(uses if result.met else []),  # to run what is exact gains nothing
        f"picture: {picture}",
        f"other budgets: adaattn plan explore {shlex.quote(str(job.target))} --html FILE",
        *gains(passes, measurement.inputs.settings, longest_input(model)),
    ]

    def show() -> None:
        print_plan(console, result.plan, buys, job.options.verbose, None if result.met else result.sentence)
        _tell_all(console, lines)

    return results, show


def gains(passes: Sequence[Benefit], settings: CalibrationSettings, positions: int | None) -> list[str]:
    """Returns a line on where a plan makes the whole model faster, as measured, and where it would gain more."""
    if not passes:
        return []
    longer = ["longer --lengths"] * (positions is None or settings.lengths[-1] < positions)
    steps = any(one.step for one in passes)
    more = [*longer, *["more rows (--batch-size)"] * (settings.aim == "step"), "a larger --budget"]
    more += ["in steps --aim step with more rows (--batch-size)"] * (steps and settings.aim != "step")
    untimed = "; captured steps were not timed" * settings.captured
    return [f"times as fast: {', '.join(one.words() for one in passes)}{untimed}; would gain more: {', '.join(more)}"]


def stored(place: Path) -> dict[str, Any]:
    """Returns what `store` wrote to a directory, as JSON."""
    failed = place / FAILED_FILE
    if failed.is_file():
        return dict(json.loads(failed.read_bytes()))
    files = {"plan": PLAN_FILE, "report": REPORT_FILE}
    return {name: json.loads((place / file).read_bytes()) for name, file in files.items()}


def _tell_all(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        tell(console, line)


def proven_in(directory: Path, *folders: str) -> list[Plan]:
    """Returns the plans that held-out text has proven, of those in some folders of a directory (glob patterns)."""
    plans = []
    for path in sorted(file for folder in folders for file in directory.glob(f"{folder}{PLAN_FILE}")):
        with contextlib.suppress(PlanError):  # what cannot be read is replaced, or refused where it is another model's
            plans.append(Plan.from_pretrained(path))
    return [plan for plan in plans if plan.verified is not None and unproven(plan) is None]


def evaluation(job: Job, dtype: str) -> str:
    """Returns the shell command that evaluates the plan on the text that it was verified on."""
    words = ["adaattn", "eval", job.model, "--plan", str(job.target), *["--dtype", dtype] * (dtype != "float32")]
    for name, value in job.options.source().items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    words += ["--windows", "strided"] if job.options.gguf_file else []
    return shlex.join([*words, *(word for text in job.verify_data or job.data for word in ("--data", str(text)))])
