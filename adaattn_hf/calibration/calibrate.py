"""From a loss budget to a verified plan, in five steps.

* measure: estimate the risk of every choice for every unit (a key/value head of a layer) from a few backward passes on
  sampled rows (`measure`, `fisher`)
* price: time the launches on this machine (`pricing`)
* choose: solve a multiple-choice knapsack within the budget of every length (`search`, `policy.knapsack`)
* aim: measure whole plans on calibration text, predict the bound that a plan will reach, and choose the next plan by it
  (`policy.aim`)
* verify: test the plan on held-out text, paired and clustered, in looks that grow until they decide (`proof`); then try
  bolder or smaller plans, each on fresh text (`campaign`)

All randomness comes from one seed, so that with prices from a file the plan is the same byte for byte. Prices measured
again differ in the last digits, which may decide between two choices of nearly equal price.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ..policy.prices import PriceTable
from .arms import Progress, silent
from .assemble import save_plan
from .benefit import whole_forward
from .campaign import Campaign
from .inputs import OutOfTime, open_inputs
from .measure import Measurement, measure, pace_of
from .pace import FORETOLD
from .scoring import NEXT_TOKEN, Scoring
from .search import picks_of, programs
from .settings import Calibration, CalibrationSettings
from .state import CalibrationState, Known
from .subject import Subject

__all__ = ["Calibration", "CalibrationSettings", "choose_and_verify", "decided", "measured", "save_plan"]


def measured(
    subject: Subject,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    *,
    verify_data: Sequence[str | Path] | None = None,
    scoring: Scoring = NEXT_TOKEN,
    prices: PriceTable | None = None,
    directory: Path | None = None,
    resume: bool = False,
    known: Known | None = None,
    progress: Progress = silent,
    say: Callable[..., None] = silent,
    expect: Callable[[Mapping[str, float]], None] = silent,
    opened: float | None = None,
) -> Measurement:
    """Returns risks and prices of a model, which serve any number of budgets; a plan that it carries is removed.

    A model that cannot carry a plan, or text that is too short, is a ValueError.

    Args:
        subject: A model loaded with `attn_implementation="adaattn"`, on the device and in the dtype it will run in.
        encode: Maps text to token ids, without special tokens.
        data: Files and directories of text.
        verify_data: Held-out text of another source; disjoint parts of `data` are used if absent.
        scoring: How the model is scored: `MaskedTokens.of(tokenizer)` for a masked-language model.
        prices: Prices measured before; measured now if absent.
        directory: Where the state is saved after every sequence, until `CalibrationState.forget`.
        resume: Continue from the state saved there.
        known: Risks of an earlier run on the same weights and text, taken in place of measuring them.
        expect: Told of the seconds that stages will take, before the first one and whenever more is known.
        opened: When the calibration began, by `time.monotonic`, from which `settings.minutes` count; now if absent.
    """
    # losses are relative to the exact model, and a plan for other weights, fine-tuned since, would be refused
    subject.remove_plan()
    if settings.with_cache and not scoring.generates:
        raise ValueError(
            f"optimize, kv_bytes: got {settings.optimize!r} and {settings.kv_bytes} for a model that generates nothing "
            "and keeps no cache, expected a causal model; leave them out"
        )
    inputs = open_inputs(
        subject, encode, data, settings, verify_data=verify_data, scoring=scoring, progress=progress, say=say
    )
    inputs = replace(inputs, expect=expect, opened=opened or inputs.opened)
    if expect is not silent and settings.lengths[-1] > FORETOLD:
        progress("estimate", 0, 1)
        pace = pace_of(inputs)
        inputs = replace(inputs, pace=pace)
        progress("estimate", 1, 1)
        stages = pace.stages(settings, inputs.team.size)
        expect(stages if known is None else {**stages, "risk": 0.0})
    try:
        return measure(inputs, prices=prices, directory=directory, resume=resume, known=known)
    except ValueError:  # a refusal leaves nothing behind that other arguments would have to go on with
        if directory is not None and not resume:
            CalibrationState.forget(directory)
        raise


def decided(measurement: Measurement, budget: float | None = None) -> Calibration:
    """Returns the plan of a budget in nats/token, that of the settings if absent, and times whole passes of it.

    Budgets are searched and verified one by one, and nothing that one learns from held-out text aims another: each has
    the error rate of its settings, and k of them are all kept with at least 1 - k alpha.
    """
    inputs = measurement.inputs
    result = choose_and_verify(measurement, replace(inputs.settings, budget=budget or inputs.settings.budget))
    if inputs.pace is not None:
        inputs.expect({"plans": 0.0, "speed": inputs.pace.speed(inputs.settings) * result.met})
    if result.met and inputs.settings.rounds and inputs.team.leads:
        by_layer = programs(measurement, picks_of(measurement, result.plan))
        try:
            timed = whole_forward(inputs, by_layer, inputs.settings.rounds)
            result.report["whole_forward"] = [asdict(one) for one in timed]
        except OutOfTime as over:
            inputs.say(f"whole passes are not timed: {over}")
        except torch.OutOfMemoryError:  # the plan is verified, and stays
            inputs.say(
                f"whole passes of {inputs.settings.batch} sequences have no room to be timed; a smaller "
                "--batch-size would fit"
            )
    return result


def choose_and_verify(measurement: Measurement, settings: CalibrationSettings | None = None) -> Calibration:
    """Returns the boldest plan that passed verification, or the exact plan.

    `settings` may have another budget or verification than those of the measurement.
    """
    if settings is not None:
        measurement = replace(measurement, inputs=measurement.inputs.with_settings(settings))
    return Campaign(measurement).run()
