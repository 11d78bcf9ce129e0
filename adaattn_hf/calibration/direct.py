"""Pass two of calibration: the KL that one choice of one unit costs, measured by a forward pass of its own.

Only pairs that decide a plan are measured (`policy.decisive`). Layers below the changed one answer from the
outputs of the exact pass, so that a change near the end of the model costs little attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..attention.request import AttentionRequest
from ..attention.tap import tapping
from ..plans import execute
from ..plans.program import Program
from .arms import ModelArms, compare, exact_tap
from .fisher import layer_index
from .scoring import Input

STRETCHES = 8
"""Stretches of a sequence whose mean KL is kept apart, for the error of the whole."""


class SingleChanges:
    """One sequence, and what changing the attention of single layers does to its predictions.

    Keeps the attention outputs of all layers of this sequence.

    Args:
        arms: The model.
        given: Token ids `[1, n]`, or a reading.
    """

    def __init__(self, arms: ModelArms, given: Input) -> None:
        self._arms, self._given = arms, given
        self._outputs: dict[int, Tensor] = {}

        def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
            out = exact_tap(module, request)
            self._outputs[layer_index(module)] = out
            return out

        with torch.no_grad(), tapping(tap):
            self._exact = arms.hidden(given)

    def kl(self, program: Program) -> NDArray[np.float64]:
        """Returns the mean KL `[STRETCHES]` of each stretch under a program of one layer, exact elsewhere."""
        changed = program.plan.layer

        def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
            index = layer_index(module)
            if index < changed:
                return self._outputs[index]
            return execute.attend(program, request).out if index == changed else exact_tap(module, request)

        scores = compare(self._arms, self._given, tap, self._exact)
        return np.array([part.mean() for part in np.array_split(scores.kl[0], STRETCHES)])


def mean_and_error(stretches: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Returns the mean KL over sequences and stretches, and its standard error."""
    values = np.concatenate(stretches)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def measured_pairs(
    arms: ModelArms,
    readings: Sequence[Input],
    pairs: Sequence[tuple[int, int]],
    program: Callable[[int, int], Program],
    step: Callable[[], None],
) -> Mapping[tuple[int, int], NDArray[np.float64]]:
    """Returns the mean KL of the stretches of one sequence under each pair (unit, choice) alone.

    Args:
        arms: The model.
        readings: The passes over the sequence.
        pairs: Units and choices.
        program: The program of one unit taking one choice, the rest of its layer exact.
        step: Called after each pair.
    """
    every = [SingleChanges(arms, reading) for reading in readings]
    found: dict[tuple[int, int], NDArray[np.float64]] = {}
    for pair in pairs:
        made = program(*pair)
        found[pair] = np.concatenate([changes.kl(made) for changes in every])
        step()
    return found
