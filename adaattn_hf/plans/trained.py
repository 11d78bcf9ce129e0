"""Plans that go on while a model is trained under them: those of choices that depend on no weights.

A window is the same function of whatever queries and keys there are; mean keys and bases were calibrated on weights
that training changes. No budget is proven for trained weights: a checkpoint of them refuses the plan when it is loaded,
until it is calibrated.
"""

from __future__ import annotations

import logging

from .program import Program

logger = logging.getLogger("adaattn_hf")

_said: set[str] = set()


def trains(program: Program | None) -> bool:
    """Whether a layer's part of a plan, None if it is exact, goes on when its weights are trained."""
    if program is None:
        return False
    held = program.tensors
    return program.has_gradient and held.key_mean is None and not held.query_basis and not held.key_basis


def say_unproven(weights: str) -> None:
    """Says once of a plan, told by the hash of the model that it was made for, that a model was trained under it."""
    if weights not in _said:
        _said.add(weights)
        logger.warning(
            "adaattn: the model was trained under its plan, whose budget is proven for the weights before; calibrate "
            "the trained model, or remove the plan with adaattn_hf.remove_plan(model)"
        )
