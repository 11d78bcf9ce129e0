"""Plans as they run in a process: with permissions and states that no file can hold.

A window is the same function of whatever queries and keys there are, so that a plan of windows goes on while a model is
trained under it; mean keys and bases were calibrated on weights that training changes. No budget is verified for
trained weights: whoever saves them saves no plan.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from adaattn_hf.plans.program import Program

logger = logging.getLogger("adaattn_hf")

_said: set[tuple[str, str]] = set()

TRAINED = (
    "the model is trained under its plan, which was verified for the weights before: it goes on under it here, and is "
    "saved without it; calibrate the trained model"
)
ADAPTED = (
    "the model has adapters, and its plan was verified without them: what they change is not covered; merge them and "
    "calibrate again to have it verified"
)

SAVED = "saved without the plan: the weights have changed since; calibrate the trained model"


class Allowed(dict[str, Any]):
    """A plan that runs though held-out text has not shown it good: JSON keeps its entries and not this permission."""


class Trained(Allowed):
    """A plan that a model is being trained under: it goes on in this process, whatever the weights become.

    What Transformers writes to a file is a copy of the fields of a configuration, and holds no such plan. The copy of a
    whole model does.
    """

    _holder: weakref.ref[Any] | None = None

    @classmethod
    def under(cls, config: Any, plan: Mapping[str, Any]) -> Trained:
        """The plan in the settings of a configuration."""
        made = cls(plan)
        made._holder = weakref.ref(config)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Trained | None:
        """Copies it along with the configuration that holds it, else leaves it out."""
        config = None if self._holder is None else self._holder()
        if config is not None and id(config) in memo:
            return Trained.under(memo[id(config)], self)
        say(str(self.get("weight_hash")), SAVED)
        return None


def trains(program: Program | None) -> bool:
    """Whether a layer's part of a plan, None if it is exact, goes on when its weights are trained."""
    if program is None:
        return False
    held = program.tensors
    return program.has_gradient and held.key_mean is None and not held.query_basis and not held.key_basis


def say(weights: str, words: str) -> None:
    """Says something once of a plan, told by the hash of the model that it was made for."""
    if (weights, words) not in _said:
        _said.add((weights, words))
        logger.warning("adaattn: %s", words)
