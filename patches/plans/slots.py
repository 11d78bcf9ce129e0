"""Where a bound plan lies: the part of each attention module on the module, and what a block runs in its place."""

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from adaattn_hf.plans.bound_layer import BoundLayer

PLAN, LAYER = "adaattn_plan", "adaattn_layer"
"""Attributes of a trunk and of an attention module; that of a module is None where its plan leaves it exact."""
BLOCKS = "adaattn_blocks"
"""Marks a module while some thread runs it by another plan: a graph that is traced or run then is traced again."""

instead_of: ContextVar[tuple[dict[nn.Module, Any], ...]] = ContextVar("adaattn_plans_of_blocks", default=())
"""Of each open block of `use_plan`, the innermost last: what stands in for a trunk's plan and its modules' parts."""
instead = instead_of.get


def within(module: nn.Module, own: Any) -> Any:
    """Returns what the innermost block runs in place of `own`, which is the module's plan or part of one."""
    for block in reversed(instead()):
        found = block.get(module, block)  # once: another thread may empty it
        if found is not block:
            return found
    return own


def layer_of(module: nn.Module) -> "BoundLayer | None":
    """Returns an attention module's part of the plan that holds in this thread, None if it is exact."""
    return within(module, module.__dict__.get(LAYER))  # type: ignore[no-any-return]
