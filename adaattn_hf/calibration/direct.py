"""Pass two of calibration: measures the KL of single choices of single units, each by a forward pass of its own.

Only pairs of unit and choice that decide a plan are measured (`policy.decisive`). Layers below the changed one reuse
the attention outputs of the exact pass, so that changes in late layers are cheap.
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
"""Parts of a sequence whose mean KL is kept separately, to estimate the standard error."""


class SingleChanges:
    """Measures how changing the attention of a single layer changes the predictions for one sequence.

    Keeps the attention outputs of all layers for this sequence.

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
        """Returns the mean KL of each part under a program of one layer, all others exact.

        There are `STRETCHES` parts, fewer of a reading that has fewer predictions.
        """
        changed = program.plan.layer

        def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
            index = layer_index(module)
            if index < changed:
                return self._outputs[index]
            return execute.attend(program, request).out if index == changed else exact_tap(module, request)

        scores = compare(self._arms, self._given, tap, self._exact)
        parts = np.array_split(scores.kl[0], min(STRETCHES, scores.kl.shape[1]))
        return np.array([part.mean() for part in parts])


def mean_and_error(stretches: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Returns the mean KL over sequences and their parts, and its standard error."""
    values = np.concatenate(stretches)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def measured_pairs(
    arms: ModelArms,
    readings: Sequence[Input],
    pairs: Sequence[tuple[int, int]],
    program: Callable[[int, int], Program],
    step: Callable[[], None],
) -> Mapping[tuple[int, int], NDArray[np.float64]]:
    """Returns the mean KL of the parts of one sequence for each pair (unit, choice) by itself.

    Args:
        arms: The model.
        readings: The passes over the sequence.
        pairs: Units and choices.
        program: Makes the program in which one unit takes one choice and the rest of its layer is exact.
        step: Called after each pair.
    """
    every = [SingleChanges(arms, reading) for reading in readings]
    found: dict[tuple[int, int], NDArray[np.float64]] = {}
    for pair in pairs:
        made = program(*pair)
        found[pair] = np.concatenate([changes.kl(made) for changes in every])
        step()
    return found
