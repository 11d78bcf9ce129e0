"""One calibration of the command line: what it needs, and what is said of its time and its memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from adaattn_hf.calibration.inputs import LEAST_HELD_OUT
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.calibration.state import CalibrationState, kept_in
from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.eval.objectives import NEXT_TOKEN, MaskedTokens, Objective
from adaattn_hf.eval.progress import duration
from adaattn_hf.patches.checkpoint import Checkpoint
from adaattn_hf.policy.candidates import refuse_unknown
from adaattn_hf.policy.prices import PriceTable

from .options import Options
from .place import nats

STAGES = {
    "estimate": "estimating the time", "moments": "reading each layer", "risk": "measuring risks",
    "prices": "timing choices", "joint": "trying plans", "plans": "finding and verifying plans",
    "speed": "timing the model",
}  # fmt: skip
"""What a user reads of the stages of a calibration."""


@dataclass(frozen=True)
class Job:
    """One calibration with everything that it needs.

    Attributes:
        target: Directory of the plan, or of the directories of several plans; holds measured risks during the run.
        settings: How the plan is made, with the first budget.
        budgets: Loss in nats/token of each plan, by directory.
        began: When the command began, by `time.monotonic`.
    """

    model: str
    data: tuple[Path, ...]
    verify_data: tuple[Path, ...] | None
    target: Path
    settings: CalibrationSettings
    prices: PriceTable | None
    options: Options
    budgets: Mapping[Path, float] = field(default_factory=dict)
    known: CalibrationState | None = None
    began: float = field(default_factory=time.monotonic)


def job_of(options: Options, target: Path, places: Sequence[Path]) -> Job:
    """Returns the job for the options; without a model the packaged one, without text its pages.

    `places` are the directories of the plans. Missing text or prices are a ValueError.
    """
    budgets = [nats(one) for one in options.budget or ("1%" if options.model is None else "0.1%",)]
    if options.model is not None and not options.data:
        raise ValueError("data is absent, expected text: --data FILE, a .txt or .jsonl or a directory of them")
    packaged, prices = not options.data, options.prices
    if prices is not None and not prices.is_file():
        raise ValueError(
            f"prices: {prices} is no file; expected the adaattn_prices.json that an earlier calibration wrote"
        )
    refuse_unknown(options.families)
    settings = options.fill(CalibrationSettings, budget=budgets[0])
    risks = None if options.risks is None else CalibrationState.read(options.risks)
    if risks is not None:
        lengths = {"lengths": options.lengths} if options.lengths else {}
        settings = replace(settings, **{**risks.settings, **lengths})
    return Job(
        options.model or str(demo_model_path("llama")),
        options.data or (pages_path("calibration"),),
        options.verify_data or ((pages_path("heldout"),) if packaged else None),
        target,
        settings,
        None if prices is None else PriceTable.from_json(prices.read_text(encoding="utf-8")),
        options,
        dict(zip(places, budgets, strict=True)),
        risks,
    )


def scoring_of(loaded: Checkpoint, options: Options) -> Objective:
    """Returns how a checkpoint is scored: by next tokens, or as a masked LM that is read as the options say."""
    if loaded.objective == "masked":
        return MaskedTokens.of(loaded.tokenizer, options.mask_share, options.maskings)
    return NEXT_TOKEN


def outlook(job: Job, stages: Mapping[str, float]) -> list[str]:
    """Returns lines on how long a calibration takes, what would make it shorter, and what an interrupt keeps."""
    s, stages = job.settings, {**stages, "plans": len(job.budgets) * stages["plans"]}
    total = sum(stages.values())
    told = [one for one in ("risk", "prices", "plans") if stages[one]]
    by_stage = ", ".join(f"{STAGES[one]} {duration(stages[one])}" for one in told)
    shorter = [f"--lengths {s.lengths[-1] // 2}"]
    if stages["risk"] > stages["plans"]:
        shorter += [f"--sequences {s.sequences // 2}"] * (s.sequences > 1)
    else:
        shorter += [f"--held-out {s.held_out // 2}"] * (s.held_out >= 2 * LEAST_HELD_OUT)
    lines = [f"time: about {duration(total)} in all ({by_stage}); shorter with {', '.join(shorter)} or --minutes N"]
    if s.minutes is not None and total > 60.0 * s.minutes:
        lines.append(f"--minutes {s.minutes:g} will end it before that, perhaps without a plan")
    return [*lines, f"Ctrl-C keeps what is measured by then in {job.target}, and --resume goes on with it"]


def kept(target: Path, again: str) -> str:
    """Returns the words on what a run that ends early keeps, and how to go on."""
    words = f"what is measured is kept in {target}; {again} goes on"
    return words if kept_in(target) else "nothing was measured yet, so nothing is kept"


def out_of_memory(job: Job, device: object, stage: str, error: str) -> str:
    """Returns the out-of-memory message: what was being done, what would fit, and what is kept."""
    longest, batch = job.settings.lengths[-1], job.settings.batch
    doing = {
        "": f"loading the weights of {job.model}",
        "estimate": f"{STAGES['estimate']} by sequences shorter than {longest} tokens",
        "moments": f"reading the first sequence of {longest} tokens",
        "risk": f"{STAGES['risk']} on sequences of {longest} tokens",
        "prices": f"timing attention of {batch} times {longest} tokens",
        "joint": f"measuring whole plans on {job.settings.joint} sequences of {longest} tokens",
        "speed": f"{STAGES['speed']} on {longest} tokens",
    }.get(stage, f"verifying a plan on sequences of {longest} tokens")
    shorter = f"shorter lengths (--lengths {max(longest // 2, 32)})"
    fits = {
        "": "another --dtype (bfloat16 takes half of float32)",
        "risk": f"{shorter} or fewer rows (--rows {max(job.settings.rows // 2, 1)})",
        "prices": f"a smaller batch (--batch-size {batch // 2})" if batch > 1 else shorter,
        "joint": f"{shorter} or fewer sequences at once (--joint {max(job.settings.joint - 1, 1)})",
    }.get(stage, shorter)
    stays = "nothing was finished before it"
    if file := kept_in(job.target):
        stays = (
            f"what was measured before is kept in {file}: the same command with --resume goes on, with another "
            "--batch-size or --held-out, too; delete that file to begin anew with other lengths, rows or sequences"
        )
    return (
        f"memory: {device} has none left while {doing} ({error}), expected room for it; what would fit: {fits}, or a "
        f"device with more memory; {stays}"
    )
