"""Proves a saved plan on given text, with the code of a calibration."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from adaattn_hf.eval.progress import shown_progress
from adaattn_hf.patches.checkpoint import Checkpoint, load, placed, resolve_device
from adaattn_hf.patches.plans.attach import programs_for
from adaattn_hf.patches.plans.subject import Subject

from ..calibration import corpus
from ..calibration.arms import ModelArms, stored_tap
from ..calibration.corpus import TokenSequence
from ..calibration.inputs import Inputs, refuse_longer
from ..calibration.pricing import machine
from ..calibration.scoring import Scoring
from ..calibration.settings import CalibrationSettings, Masking
from ..calibration.storage import PROTOCOL
from ..calibration.texts import refuse_repeats
from ..calibration.verify import Evidence, activation, gather, judge
from ..plans.plan import Plan, PlanError, Verified
from ..plans.record import read_record
from ..plans.store import PLAN_FILE, text_file
from ..policy.acceptance import Gates
from .calibration_job import scoring_of
from .memory import room_or_sentence
from .pictures.headline import REPORT_FILE, name_of
from .place import PLAN_DIRECTORY

if TYPE_CHECKING:  # the command imports this module
    from .verify import Proved


def prove(model: str, asked: Proved, console: Console) -> dict[str, Any]:
    """Returns the verdict by length as JSON values, next to the stored verdict.

    A plan with a cache format is proved over that cache. An exact plan without one passes: it changes nothing.

    Raises:
        ValueError: If there is no text, or too little.
        PlanError: If there is no plan, or it belongs to another model.
    """
    device = resolve_device(asked.device)
    if not asked.data:
        raise ValueError("data is absent, expected text: --data FILE, a .txt or .jsonl or a directory of them")
    refuse_repeats(asked.data, None)
    own = Path(model) / PLAN_FILE
    path = asked.plan or (Path(model) if own.is_file() else Path(PLAN_DIRECTORY))
    plan = Plan.from_pretrained(path)
    settings = settings_of(plan)
    kept = plan.protocol.get("scoring", {})
    masking = Masking(**{one.name: kept[one.name] for one in fields(Masking) if one.name in kept})
    sentence = (
        f"memory: {device} has none left ({{}}), expected room for sequences of {plan.max_length} tokens; give another "
        "--device"
    )
    stored, verdicts = stored_proof(plan), dict[int, Verified]()
    with room_or_sentence(sentence.format):
        if not plan.is_exact or _format(plan) != "model":
            loaded = load(model, plans=(str(path),), device="cpu", implementation="adaattn", **asked.source())
            verdicts = _verdicts(path, plan, settings, loaded, scoring_of(loaded, masking), device, asked, console)
    return {
        "model": name_of(plan),
        "cache": _format(plan),
        "passed": all(one.passed for one in verdicts.values()),
        "verdicts": {str(length): asdict(one) for length, one in verdicts.items()},
        "stored": None if stored is None else asdict(stored),
        "differing": differing(plan, device),
    }


def _verdicts(
    path: Path,
    plan: Plan,
    settings: CalibrationSettings,
    loaded: Checkpoint,
    scoring: Scoring,
    device: torch.device,
    asked: Proved,
    console: Console,
) -> dict[int, Verified]:
    """Returns the verdict by length: one look, at the level of the stored proof if there is one."""
    subject = Subject(placed(loaded.model, asked.device))
    refuse_longer(plan.lengths, subject.positions, name_of(plan))
    _, found = programs_for(loaded.model, plan, unverified=True)  # the verdict is what is asked for
    programs = {index: one for index, (_, one) in found.items() if one is not None}
    inputs = Inputs(subject, ModelArms(loaded.model), settings, scoring, {})
    (pool, apart), ranges = held_out(plan, settings, asked.data, loaded, scoring), looked_at(path)
    stored = stored_proof(plan)
    tries = 1 if stored is None else stored.tries
    haystacks = settings.haystacks if scoring.generates else 0
    heads = len(plan.attention_layers) * len(plan.layers[0].choices) if programs else 1
    verdicts, tap = {}, stored_tap(programs, _format(plan))
    work = {f"verify {length}": float(length) for length in plan.lengths}
    with shown_progress(work, console, quiet=asked.quiet) as progress:
        for length in plan.lengths:
            first, last = ranges.get(str(length), (0, settings.most_held_out))
            shard = pool[first:last] if last <= len(pool) else pool[: settings.most_held_out]
            cut = [replace(one, tokens=one.tokens[: scoring.content(length)]) for one in shard]
            step = partial(progress, f"verify {length}", total=len(cut) + haystacks)
            evidence = Evidence(apart=apart)
            gather(inputs, tap, cut, evidence, plan.seed + tries, haystacks, step)
            verdicts[length] = judge(
                evidence,
                Gates(**{"budget": plan.budget, **plan.protocol.get("gates", {})}),
                confidence=1.0 - settings.alpha if stored is None else stored.confidence,
                tries=tries,
                activation_share=activation(programs, heads, length, scoring.causal),
                predicted=plan.predicted_loss if stored is None else stored.predicted_kl,
            )
    return verdicts


def _format(plan: Plan) -> str:
    """Returns the plan's cache format."""
    return "model" if plan.cache is None else plan.cache[0]


def stored_proof(plan: Plan) -> Verified | None:
    """Returns the stored verdict, over the plan's cache if it has one, None without; PlanError if it is malformed."""
    if _format(plan) == "model":
        return plan.verified
    kept = plan.protocol[PROTOCOL].get("verified")
    return None if kept is None else Verified(**read_record(Verified, kept, "protocol.cache.verified"))


def settings_of(plan: Plan) -> CalibrationSettings:
    """Returns the settings that a plan was made with, else the defaults; PlanError if they are not valid."""
    kept = plan.protocol.get("settings", {})
    try:
        words: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in kept.items()}
        return CalibrationSettings(**words, budget=plan.budget, lengths=plan.lengths, seed=plan.seed)
    except (AttributeError, TypeError, ValueError) as error:
        raise PlanError(
            f"protocol.settings: got {kept!r:.60}, expected those of a calibration ({error}); calibrate again"
        ) from error


def held_out(
    plan: Plan, settings: CalibrationSettings, data: Sequence[Path], loaded: Checkpoint, scoring: Scoring
) -> tuple[list[TokenSequence], bool]:
    """Returns sequences of a text, drawn as in a calibration, and whether each source must keep the budget.

    From the plan's own text, sequences that chose the plan are left out; from other text, sources give equally many.

    Raises:
        ValueError: A source has fewer than two.
    """
    s, length = settings, scoring.content(plan.max_length)
    own, most = s.sequences + s.joint, s.most_held_out * (s.tries + s.bolder)
    sample = corpus.draw(data, loaded.encode, length, {"held_out": 2}, s.seed, own + most - 2)
    drawn = sample.parts["held_out"]
    words = "".join(f"{one}:{sample.fingerprint}:" for one in plan.lengths)
    if hashlib.sha256(words.encode()).hexdigest() == plan.data_fingerprint:
        return drawn[own:], False
    counts = Counter(one.source for one in drawn[:most])
    fewest = min(counts[str(path)] for path in data)
    if fewest < 2:
        raise ValueError(
            f"data: a source holds {fewest} sequences of {length} tokens, expected at least 2 of every source; give "
            "more of its text, or leave it out"
        )
    return drawn[: fewest * len(data)], True


def looked_at(path: Path) -> dict[str, tuple[int, int]]:
    """Returns the range of sequences that the stored proof read, by length; PlanError if the report is malformed."""
    report = (path if path.is_dir() else path.parent) / REPORT_FILE
    if not report.is_file():
        return {}
    try:
        history = json.loads(text_file(report))["history"]
        last = [entry["held_out"] for entry in history if "verified" in entry][-1:]
        return {length: (int(start), int(stop)) for one in last for length, (start, stop) in one.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{report}: got another text ({error}), expected the report of `adaattn calibrate`; delete it, or "
            "calibrate again"
        ) from error


def differing(plan: Plan, device: torch.device) -> list[str]:
    """Returns, in words, how machine and versions differ from those that made the plan."""
    known = (
        ("machine", plan.protocol.get("machine"), machine(device)),
        ("torch", plan.torch, torch.__version__),
        ("transformers", plan.transformers, version("transformers")),
        ("adaattn", plan.adaattn, version("adaattn-hf")),
    )
    return [f"{name} was {there}, is {here}" for name, there, here in known if there not in (None, here)]
