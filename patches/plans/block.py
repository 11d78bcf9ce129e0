"""Runs a model with another plan inside a block, for one thread or request only; the model's own plan stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from torch import nn

from adaattn_hf.plans.plan import Plan, PlanError

from ..models.support import Holder, model_in, refuse_other_attention
from .bound import BoundPlan, hooked_plans
from .hashes import base_of
from .slots import BLOCKS, PLAN, instead_of

MAX_CHECKED_PLANS = 8
"""Plans per model whose checks are remembered, the newest ones: their hooks stay on."""
_lock = RLock()  # garbage collected inside may be a generator that ends its block


class Blocks:
    """How many blocks are open for a model. Copies and pickles are `False`: nobody runs a copy in a block yet."""

    open = 0

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


@contextmanager
def use_plan(model: Holder, plan: Plan | str | Path | None, *, unverified: bool = False) -> Iterator[None]:
    """Runs a model by another plan inside the `with` block, or exactly; its own plan stays and is back behind it.

    The block belongs to the thread, or the asyncio task, that opens it: two requests may run one model by two plans at
    once. Blocks nest, the innermost holds, and an exception leaves nothing behind. A generator that yields inside one
    leaves it open for its caller; a task that starts inside one keeps it. All that calls the model is served:
    `generate`, pipelines, a named backend, every cache. `config.adaattn["monitor"]` rests meanwhile; `explain` and
    `plan_of` speak of the model's own plan.

    Not served, and refused by name: training mode, whose layers may be computed again behind the block;
    `generate_batch`, which has a thread of its own; and graphs of `torch.compile(fullgraph=True)` that are called while
    a block is open for their model (without `fullgraph` its attention runs outside the graphs meanwhile).

    Args:
        model: A model that runs one of our attentions, or what holds it (a pipeline, PEFT, sentence-transformers).
        plan: A plan (see `Plan.from_pretrained`), each object of which is checked once, or None for exact attention.
        unverified: Run the plan though held-out text has not shown it good.

    Raises:
        PlanError: The plan does not belong to the model, or the model runs another attention.
    """
    inner = model_in(model)
    refuse_other_attention(inner, PlanError)
    trunk = base_of(inner)
    modules: dict[Any, Any] = {module: None for module in trunk.modules() if hasattr(module, "config")}
    if plan is not None:
        bound = _bound(inner, trunk, Plan.from_pretrained(plan), unverified)
        modules |= {**bound.layers, trunk: bound}
    marked = (trunk, *modules)
    # a block that nobody closes ends with the interpreter, which has taken this module's names away by then
    lock, plans_of_blocks, mark = _lock, instead_of, BLOCKS
    with lock:
        # compiled graphs see by a mark that a block is open in some thread; the last block removes it
        blocks = trunk.__dict__.get(mark) or Blocks()
        blocks.open += 1
        for module in marked:
            module.__dict__[mark] = blocks
    opened = plans_of_blocks.set((*filter(None, plans_of_blocks.get()), modules))
    try:
        yield
    finally:
        # generators may end their blocks in another order
        rest = tuple(block for block in plans_of_blocks.get() if block is not modules)
        try:
            plans_of_blocks.reset(opened)
        except ValueError:  # from another thread or task, as a collector of garbage may: it is over in all of them
            modules.clear()
        plans_of_blocks.set(rest)
        with lock:
            blocks.open -= 1
            for module in marked if not blocks.open else ():
                module.__dict__.pop(mark, None)


def _bound(model: nn.Module, trunk: nn.Module, plan: Plan, unverified: bool) -> BoundPlan:
    current, bound_plans = trunk.__dict__.get(PLAN), [*hooked_plans(trunk)]
    for bound in bound_plans:
        if bound.plan is plan and bound.unverified is unverified:
            if bound.snapshot is None or not bound.snapshot.same():
                bound.check_model(trunk)
            return bound
    bound = BoundPlan.of(model, plan, unverified=unverified)
    for oldest in [other for other in bound_plans if other is not current][: 1 - MAX_CHECKED_PLANS]:
        oldest.unhook(trunk)
    bound.hook(trunk)
    return bound
