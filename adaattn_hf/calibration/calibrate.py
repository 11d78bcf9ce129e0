"""From a loss budget to a verified plan, in five steps.

* measure: the risk of every choice of every unit, a key/value head of a layer, from a few backward passes on
  sampled rows (`measure`, `fisher`)
* price: the launches, timed on this machine (`pricing`)
* choose: a multiple-choice knapsack inside what every length affords (`search`, `policy.knapsack`)
* aim: whole plans measured on calibration text say what bound a plan will reach, and the next is chosen by it
  (`policy.aim`)
* verify: held-out text, paired and clustered, in looks that grow until they decide (`proof`); then bolder or
  smaller plans, each on fresh text (`campaign`)

Everything random comes from one seed; with the prices of a file the plan is the same byte for byte. Prices
timed anew differ in the last digits, and may tip a choice between two of nearly the same price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from torch import nn

from ..policy.prices import PriceTable
from .arms import Progress, silent
from .assemble import save_plan
from .benefit import whole_forward
from .campaign import Campaign
from .inputs import open_inputs, unsaid
from .measure import Measurement, measure
from .scoring import NEXT_TOKEN, Scoring
from .search import picks_of, programs, refine, solve
from .settings import Calibration, CalibrationSettings
from .state import CalibrationState

__all__ = [
    "Calibration",
    "CalibrationSettings",
    "calibrate",
    "choose_and_verify",
    "measure_model",
    "save_plan",
]


def calibrate(
    model: nn.Module,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    *,
    verify_data: Sequence[str | Path] | None = None,
    scoring: Scoring = NEXT_TOKEN,
    prices: PriceTable | None = None,
    directory: Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
    say: Callable[[str], None] = unsaid,
) -> Calibration:
    """Returns a plan for a model, verified on held-out text.

    Args:
        model: A model loaded with `attn_implementation="adaattn"`, on the device and in the dtype it will run
            in.
        encode: Text to token ids, without special tokens.
        data: Files and directories of text.
        settings: How the plan is made.
        verify_data: Held-out text of another source; disjoint parts of `data` when absent.
        scoring: What the model is scored on: `MaskedTokens.of(tokenizer)` for a masked-language model.
        prices: Prices measured before; measured now when absent.
        directory: Where the state is kept after every sequence.
        resume: Go on with the state found there.
        progress: Told what is being done.
        say: Told in words what the user should know before it takes time.

    Raises:
        ValueError: If the model cannot carry a plan, or the text is too short.
    """
    if settings.with_cache and not scoring.generates:
        raise ValueError(
            f"optimize, kv_bytes: got {settings.optimize!r} and {settings.kv_bytes} for a model that generates nothing "
            "and keeps no cache, expected a causal model; leave them out"
        )
    inputs = open_inputs(
        model, encode, data, settings, verify_data=verify_data, scoring=scoring, progress=progress, say=say
    )
    measurement = measure(inputs, prices=prices, directory=directory, resume=resume)
    result = choose_and_verify(measurement)
    if result.met and settings.rounds and inputs.team.leads:
        by_layer = programs(measurement, picks_of(measurement, result.plan))
        result.report["whole_forward"] = [
            asdict(one) for one in whole_forward(inputs, by_layer, settings.rounds)
        ]
    if directory is not None and inputs.team.leads:
        CalibrationState.forget(directory)
    return result


def measure_model(
    model: nn.Module,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    *,
    verify_data: Sequence[str | Path] | None = None,
    prices: PriceTable | None = None,
    scoring: Scoring = NEXT_TOKEN,
    directory: Path | None = None,
) -> Measurement:
    """Returns risks and prices of a model with nothing chosen, for ablations and studies.

    Given a directory, what was measured is kept there, and a state found there is gone on with.
    """
    inputs = open_inputs(model, encode, data, settings, verify_data=verify_data, scoring=scoring)
    return measure(inputs, prices=prices, directory=directory, resume=directory is not None)


def choose_and_verify(measurement: Measurement, settings: CalibrationSettings | None = None) -> Calibration:
    """Returns the boldest plan that passed, or the exact plan.

    Args:
        measurement: Risks and prices of a model.
        settings: Another budget, or another way to prove it, than those of the measurement.
    """
    if settings is not None:
        measurement = replace(measurement, inputs=measurement.inputs.with_settings(settings))
    s = measurement.inputs.settings
    if s.direct:
        limit = np.full(len(s.lengths), 0.5 * s.budget)
        measurement = refine(measurement, solve(measurement, limit), limit, s.direct)
    return Campaign(measurement).run()
