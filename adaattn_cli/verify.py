"""`adaattn verify`: verifies a saved plan on given text, with the code of a calibration.

Its budget, lengths, choices and cache are its claim. All else is the program's own, or typed: limits, level and text.
"""

import hashlib
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adaattn_hf import __version__
from adaattn_hf.calibration.inputs import Inputs, Run, cut, each_source, refuse_longer
from adaattn_hf.calibration.passes import stock_distance
from adaattn_hf.calibration.pricing import machine
from adaattn_hf.calibration.proof import verdict_at
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.arms import ModelArms
from adaattn_hf.eval.objectives import Objective
from adaattn_hf.eval.progress import shown_progress, tell
from adaattn_hf.eval.texts import refuse_repeats
from adaattn_hf.eval.windows import draw
from adaattn_hf.patches.checkpoint import Checkpoint, load, placed, read_config, resolve_device
from adaattn_hf.patches.models.positions import longest_input
from adaattn_hf.patches.plans.bound import BoundPlan, carried_by
from adaattn_hf.plans.limits import LEVEL, Gates, most_rounding, unproven, words
from adaattn_hf.plans.plan import Plan, PlanError, Verified
from adaattn_hf.plans.store import CONFIG_KEY, PLAN_FILE
from adaattn_hf.plans.wording import allowed, in_nats
from adaattn_hf.plans.wording import share as in_percent

from .commands import JUDGED
from .ending import ending, room_or_sentence, use_threads
from .job import default_plan, scoring_of
from .options import Done, Options
from .pictures.headline import name_of


def run(options: Options) -> Done:
    """Verifies, says the verdict and returns it; code 1 if the plan does not pass."""
    console = Console(stderr=options.as_json)
    with ending(argument="data", wrong=(ValueError, FileNotFoundError, PlanError)):
        use_threads(options.threads)
        results = prove(options, console)
    differ = "figures may differ from those of the stored verification"
    tell(console, *(f"warning: {sentence}; {differ}" for sentence in results["differing"]))
    over = "" if results["cache"] == "model" else f" over a cache in {results['cache']}"
    if not results["verdicts"]:
        tell(console, f"{results['model']}: every layer is exact, and nothing is to be verified")
    for length, verdict in results["verdicts"].items():
        read = f"{verdict['tokens']:,} predictions at {length} tokens{over}"
        tell(console, f"{results['model']}, {read}: {verdict['sentence']}")
    used = results["limits"]
    lost = "2 % beyond chance" if used["needles"] is None else in_percent(used["needles"])
    tell(
        console,
        f"limits: perplexity {allowed(used['budget'])} at a level of {in_percent(used['confidence'])}, mean KL "
        f"{in_nats(used['kl'])} nats/token, likeliest token {in_percent(used['top1'], 2)}, needles lost {lost}",
        f"stored verification: {results['stored_verdict']}",
    )
    return Done(results, int(not results["passed"]))


def prove(options: Options, console: Console) -> dict[str, Any]:
    """Returns the verdict by length and the limits as JSON values, next to the stored verdict.

    A plan with a cache format is verified over that cache. An exact plan without one passes: it changes nothing. Too
    little text is a ValueError, and no plan, or one of another model, a PlanError.
    """
    device, model = resolve_device(options.device), options.model
    if not options.data:
        raise ValueError("data is absent, expected text: --data FILE, a .txt or .jsonl or a directory of them")
    refuse_repeats(options.data, None)
    path, own = options.plan, Path(model)
    if path is None:
        carries = (own / PLAN_FILE).is_file() or (
            own.is_dir() and carried_by(read_config(model, **options.source())).get(CONFIG_KEY) is not None
        )
        path = own if carries else default_plan()
    plan = Plan.from_pretrained(path)
    room = f"expected room for sequences of {plan.max_length} tokens; give another --device"
    verdicts, gates, stored_as = dict[int, Verified](), Gates(plan.budget), plan.cache[0] if plan.cache else "model"
    loosest = Gates.loosest(plan.budget, plan.dtype)
    stored, reason = plan.verified if stored_as == "model" else plan.cache_verified, unproven(plan)
    stored_verdict = words(stored, loosest) if stored and not reason else f"the plan {reason}" if reason else "none"
    with room_or_sentence(f"memory: {device} has none left ({{}}), {room}".format):
        if not plan.is_exact or stored_as != "model":
            loaded = load(model, plans=(str(path),), device="cpu", implementation="adaattn", **options.source())
            verdicts, gates = _verdicts(plan, loaded, scoring_of(loaded, options), options, console)
    return {
        "model": name_of(plan),
        "cache": stored_as,
        "passed": all(one.passed for one in verdicts.values()),
        "verdicts": {str(length): asdict(one) for length, one in verdicts.items()},
        "limits": {**asdict(gates), "top1": gates.least_top1, "kl": gates.most_kl, "confidence": LEVEL},
        "stored": None if stored is None else asdict(stored),
        "stored_verdict": stored_verdict,
        "differing": differing(plan, device, options.fill(CalibrationSettings)),
    }


def _verdicts(
    plan: Plan, loaded: Checkpoint, scoring: Objective, options: Options, console: Console
) -> tuple[dict[int, Verified], Gates]:
    settings = options.fill(CalibrationSettings, budget=plan.budget, lengths=plan.lengths)
    model = placed(loaded.model, options.device)
    refuse_longer(plan.lengths, longest_input(model), name_of(plan))
    bound_layers = BoundPlan.of(loaded.model, plan, unverified=True).by_index  # the verdict is what is asked for
    programs = {index: one for index, one in bound_layers.items() if one is not None}
    # drawn as in a calibration; of the plan's own text, sequences that chose the plan are left out
    content, searched, data = scoring.content(plan.max_length), settings.sequences + settings.joint, options.data
    parts, read = draw(data, loaded.encode, content, {"held_out": 2}, settings.seed, searched + settings.held_out - 2)
    drawn = parts["held_out"]
    text = "".join(f"{one}:{read}:" for one in plan.lengths)
    apart = hashlib.sha256(text.encode()).hexdigest() != plan.data_fingerprint
    # of other text, sources give equally many and each must pass
    pool = each_source(drawn[: settings.held_out], data, content, "data") if apart else drawn[searched:]
    if len(pool) < 2:
        raise ValueError(
            f"data: it holds {len(pool)} sequences of {content} tokens that did not choose the plan, expected at least "
            "2; give more of its text"
        )
    samples = {n: cut({"joint": pool[:1], "held_out": pool}, scoring.content(n)) for n in plan.lengths}
    inputs = Inputs(ModelArms(model), settings, scoring, samples, other_source=apart)
    rounding = min(stock_distance(inputs)[0], most_rounding(plan.dtype))
    gates = Gates(plan.budget, settings.top1, settings.needles_lost, rounding, max_kl=settings.max_kl)
    heads = len(bound_layers) * len(plan.layers[0].choices) if programs else 1
    verdicts, stored = dict[int, Verified](), plan.cache[0] if plan.cache else "model"
    with shown_progress(console, quiet=options.quiet) as progress:
        inputs = replace(inputs, run=Run(progress=progress))
        for length in plan.lengths:
            _, verdicts[length] = verdict_at(
                length, inputs, programs, heads, gates, stored=stored, number=1, predicted=plan.predicted_loss
            )
    return verdicts, gates


def differing(plan: Plan, device: torch.device, typed: CalibrationSettings) -> list[str]:
    """Returns, in words, how machine, versions and options differ from those that the plan says made it."""
    settings = {"seed": plan.seed, **plan.protocol.get("settings", {})}
    compared = (
        ("machine", plan.protocol.get("machine"), machine(device)),
        ("torch", plan.torch, torch.__version__),
        ("transformers", plan.transformers, version("transformers")),
        ("adaattn", plan.adaattn, __version__),
        *((name, settings.get(name), now) for name, now in asdict(typed).items() if name in JUDGED),
    )
    return [f"{name} was {before!s:.80}, is {now}" for name, before, now in compared if before not in (None, now)]
