"""One calibration of the command line: its budgets and text, where its plans go, what is said of time and memory.

Plans do not go into a model unless asked, nor over what is others'. Its text is read before a model is loaded.
"""

import math
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adaattn_hf.calibration.inputs import LEAST_HELD_OUT
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.calibration.state import CalibrationState, kept_in
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.eval.objectives import NEXT_TOKEN, MaskedTokens, Objective
from adaattn_hf.eval.progress import duration
from adaattn_hf.eval.texts import read_documents
from adaattn_hf.eval.windows import Encode
from adaattn_hf.patches.checkpoint import Checkpoint
from adaattn_hf.patches.plans.configured import other_model
from adaattn_hf.patches.plans.hashes import model_hash
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import PLAN_FILE
from adaattn_hf.plans.wording import allowed
from adaattn_hf.policy.candidates import refuse_unknown
from adaattn_hf.policy.prices import PriceTable

from .options import DEMO_DIRECTORY, PLAN_DIRECTORY, Options
from .pictures.headline import name_of

STAGES = {
    "estimate": "estimating the time", "moments": "reading each layer", "risk": "measuring risks",
    "prices": "timing choices", "joint": "trying plans", "plans": "finding and verifying plans",
    "speed": "timing the model",
}  # fmt: skip
"""What a user reads of the stages of a calibration."""
LENGTHS = (4096, 2048, 1024, 512, 256, 128)
"""Lengths that are tried where none is asked for, longest first."""
UNITLESS = 0.01
"""A bare number from here on may be meant in percent, and is refused."""
_BUDGET = re.compile(r"\s*(.*?)\s*(%|nats/token|nats|)\s*", re.DOTALL)
"""A number and its unit."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def read_budget(text: str) -> tuple[str, float]:
    """Returns a name for a budget's directory, and the budget in nats/token; ValueError for what is none.

    `0.1%` is ln 1.001, in `0.1pct`; `1e-3` or `1e-3nats` is itself, in `0.001nats`.
    """
    number, unit = _BUDGET.fullmatch(text).groups()  # type: ignore[union-attr]
    try:
        value = math.log1p(float(number) / 100.0) if unit == "%" else float(number)
    except ValueError as error:
        raise ValueError(
            f"budget is {text!r}, expected a rise of the perplexity such as 0.1% or a loss in nats/token such as 1e-3"
        ) from error
    if not unit and UNITLESS <= value < 1.0:
        raise ValueError(
            f"budget is {text!r}, expected a unit: write {number}% (a rise of the perplexity by {number} %) or "
            f"{number}nats (nats/token, a rise by {allowed(value).lstrip('+')})?"
        )
    if not 0.0 < value < 1.0:
        raise ValueError(
            f"budget is {text!r}, expected more than 0 and less than 1 nat/token; a rise of the perplexity has a %, "
            "such as 1%"
        )
    return f"{float(number):g}{'pct' if unit == '%' else 'nats'}", value


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
        names = (file.name for kind in WEIGHTS for file in sorted(target.glob(kind)))
        held = [name for name in names if not name.startswith("adaattn_")]
        if not (target / PLAN_FILE).is_file():
            held += ["config.json"] * (target / "config.json").is_file()
        if held:
            raise UsageError(
                f"output_dir: {target} holds {held[0]} of a model, whose config.json would be overwritten, expected a "
                f"directory for the plan alone; give another one, {PLAN_DIRECTORY} say"
            )
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


def directories(options: Options) -> dict[Path, float]:
    """Returns the budgets in nats/token by their plans' directories, of several in subdirectories; see `directory`."""
    budgets, target = dict[str, float](), directory(options)
    for text in options.budget or ("1%" if options.model is None else "0.1%",):
        name, value = read_budget(text)
        if name in budgets:
            raise ValueError(f"budget is {', '.join(options.budget)}, expected each once; leave the second {text} out")
        budgets[name] = value
    if len(budgets) == 1:
        return {target: next(iter(budgets.values()))}
    if options.in_place:
        raise UsageError(
            f"in_place: got {len(budgets)} budgets, expected one, since a model carries one plan; leave --in-place "
            "out, and each plan gets a directory of its own"
        )
    return {directory(options, name): budget for name, budget in budgets.items()}


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
    earlier: CalibrationState | None = None
    began: float = field(default_factory=time.monotonic)

    def outlook(self, stages: Mapping[str, float]) -> list[str]:
        """Returns lines on how long a calibration takes, what would make it shorter, and what an interrupt keeps."""
        s, stages = self.settings, {**stages, "plans": len(self.budgets) * stages["plans"]}
        total = sum(stages.values())
        told = [one for one in ("risk", "prices", "plans") if stages[one]]
        by_stage = ", ".join(f"{STAGES[one]} {duration(stages[one])}" for one in told)
        shorter = [f"--lengths {s.lengths[-1] // 2}"]
        if stages["risk"] > stages["plans"]:
            shorter += [f"--sequences {s.sequences // 2}"] * (s.sequences > 1)
        else:
            shorter += [f"--held-out {s.held_out // 2}"] * (s.held_out >= 2 * LEAST_HELD_OUT)
        whole = f"{duration(total)} {'from the beginning, less what is kept' if self.options.resume else 'in all'}"
        lines = [f"time: about {whole} ({by_stage}); shorter with {', '.join(shorter)} or --minutes N"]
        if s.minutes is not None and total > 60.0 * s.minutes:
            lines.append(f"--minutes {s.minutes:g} will end it before that, perhaps without a plan")
        return [*lines, f"Ctrl-C keeps what is measured by then in {self.target}, and --resume goes on with it"]

    def out_of_memory(self, device: object, stage: str, error: str) -> str:
        """Returns the out-of-memory message: what was being done, what would fit, and what is kept."""
        longest, batch = self.settings.lengths[-1], self.settings.batch
        doing = {
            "": f"loading the weights of {self.model}",
            "estimate": f"{STAGES['estimate']} by sequences shorter than {longest} tokens",
            "moments": f"reading the first sequence of {longest} tokens",
            "risk": f"{STAGES['risk']} on sequences of {longest} tokens",
            "prices": f"timing attention of {batch} times {longest} tokens",
            "joint": f"measuring whole plans on {self.settings.joint} sequences of {longest} tokens",
            "speed": f"{STAGES['speed']} on {longest} tokens",
        }.get(stage, f"verifying a plan on sequences of {longest} tokens")
        shorter = f"shorter lengths (--lengths {max(longest // 2, 32)})"
        fits = {
            "": "another --dtype (bfloat16 takes half of float32)",
            "risk": f"{shorter} or fewer rows (--rows {max(self.settings.rows // 2, 1)})",
            "prices": f"a smaller batch (--batch-size {batch // 2})" if batch > 1 else shorter,
            "joint": f"{shorter} or fewer sequences at once (--joint {max(self.settings.joint - 1, 1)})",
        }.get(stage, shorter)
        stays = "nothing was finished before it"
        if file := kept_in(self.target):
            stays = (
                f"what was measured before is kept in {file}: the same command with --resume goes on, with another "
                "--batch-size or --held-out, too; delete that file to begin anew with other lengths, rows or sequences"
            )
        return (
            f"memory: {device} has none left while {doing} ({error}), expected room for it; what would fit: {fits}, "
            f"or a device with more memory; {stays}"
        )


def job_of(options: Options, target: Path, budgets: Mapping[Path, float]) -> Job:
    """Returns the job for the options and budgets; without a model the packaged one, without text its pages.

    Missing text or prices are a ValueError.
    """
    if options.model is not None and not options.data:
        raise ValueError("data is absent, expected text: --data FILE, a .txt or .jsonl or a directory of them")
    packaged, prices = not options.data, options.prices
    if prices is not None and not prices.is_file():
        raise ValueError(
            f"prices: {prices} is no file; expected the adaattn_prices.json that an earlier calibration wrote"
        )
    refuse_unknown(options.families)
    settings = options.fill(CalibrationSettings, budget=next(iter(budgets.values())))
    risks = None if options.risks is None else CalibrationState.read(options.risks)
    if risks is not None:
        lengths = {"lengths": options.lengths} if options.lengths else {}
        settings = replace(settings, **{**risks.settings, **lengths})
    model, data = options.model or str(demo_model_path("llama")), options.data or (pages_path("calibration"),)
    held_out = options.verify_data or ((pages_path("heldout"),) if packaged else None)
    table = None if prices is None else PriceTable.from_json(prices.read_text(encoding="utf-8"))
    return Job(model, data, held_out, target, settings, table, options, budgets, risks)


def scoring_of(loaded: Checkpoint, options: Options) -> Objective:
    """Returns how a checkpoint is scored: by next tokens, or as a masked LM that is read as the options say."""
    if loaded.objective == "masked":
        return MaskedTokens.of(loaded.tokenizer, options.mask_share, options.maskings)
    return NEXT_TOKEN


def kept(target: Path, again: str) -> str:
    """Returns the words on what a run that ends early keeps, and how to go on."""
    words = f"what is measured is kept in {target}; {again} goes on"
    return words if kept_in(target) else "nothing was measured yet, so nothing is kept"


def count_tokens(paths: Sequence[Path], encode: Encode, enough: int) -> int:
    """Returns the tokens of a text, counted no further than `enough`."""
    total = 0
    for _, pieces in read_documents(paths):
        for piece in pieces:
            total += len(encode(piece))
            if total >= enough:
                return total
    return total


def fit_to_text(
    settings: CalibrationSettings,
    encode: Encode,
    data: Sequence[Path],
    verify_data: Sequence[Path] | None,
    positions: int | None,
) -> tuple[CalibrationSettings, str]:
    """Returns settings whose length and folds the text can fill, and a sentence that says which.

    The longest length is taken at which the text holds as many held-out sequences as are asked for, then half, then the
    least. Text too short for the shortest length is a ValueError.
    """
    lengths = [length for length in LENGTHS if positions is None or length <= positions] or [positions or 0]
    if positions is not None and lengths[0] < min(positions, LENGTHS[0]):
        lengths.insert(0, positions)
    searched = settings.sequences + settings.joint
    enough = lengths[0] * (searched + settings.held_out)
    fewest = max(min(LEAST_HELD_OUT, settings.held_out), 2 * len(verify_data or ()))
    tokens = count_tokens(data, encode, enough)
    held_out_tokens = count_tokens(verify_data, encode, enough) if verify_data else 0
    for wanted in (settings.held_out, max(settings.held_out // 2, fewest), fewest):
        for length in lengths:
            room = tokens // length - searched if not verify_data else held_out_tokens // length
            if room >= wanted and tokens // length >= searched:
                most = min(settings.held_out, room)
                sentence = f"text: {searched} sequences of {length:,} tokens to choose the plan, {most} to verify it"
                return replace(settings, lengths=(length,)), sentence
    needed = lengths[-1] * (searched + (0 if verify_data else fewest))
    also = f" and {lengths[-1] * fewest} held out" if verify_data else ""
    raise ValueError(
        f"data: {tokens} tokens of text{f' and {held_out_tokens} held out' if verify_data else ''}, expected at "
        f"least {needed}{also} for sequences of {lengths[-1]}; give more text"
    )
