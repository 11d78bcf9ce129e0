"""Where a bound plan lies: the part of each attention module on the module, and what a block runs in its place."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from adaattn_hf.plans.bound_layer import BoundLayer

PLAN, LAYER = "adaattn_plan", "adaattn_layer"
"""Attributes of a trunk and of an attention module; that of a module is None where its plan leaves it exact."""
BLOCKS = "adaattn_blocks"
"""Marks a module while some thread runs it by another plan: a graph that is traced or run then is traced again."""

instead_of: ContextVar[Mapping[nn.Module, Any] | None] = ContextVar("adaattn_plan_of_a_block", default=None)
"""In a block of `use_plan`, what stands in for the plan of each trunk and for the part of each of its modules."""
instead = instead_of.get


def layer_of(module: nn.Module) -> BoundLayer | None:
    """Returns an attention module's part of the plan that holds in this thread, None if it is exact."""
    bound_layer: BoundLayer | None = (instead() or {}).get(module, module.__dict__.get(LAYER))
    return bound_layer
