"""What calibration needs to know of a model besides its forward pass; `patches.plans.subject` tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from ..plans.binding import Binding
from ..plans.plan import Plan


class Subject(Protocol):
    """A model to calibrate."""

    @property
    def model(self) -> nn.Module:
        """The model, whose attention tells taps its layers by number."""

    @property
    def name(self) -> str:
        """The name that it was loaded by: a hub id, or the last part of a directory."""

    @property
    def positions(self) -> int | None:
        """The longest input that it can read, None where nothing says."""

    def binding(self, indices: Sequence[int]) -> Binding:
        """What a plan for these layers is bound to."""

    def weight_hash(self) -> str:
        """Hash of all that the model saves."""

    def give(self, plan: Plan) -> None:
        """Lets the model run by a plan."""

    def remove_plan(self) -> None:
        """Takes away the plan that the model carries."""
