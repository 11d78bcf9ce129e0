"""Runs a model with another plan inside a block, for one thread or request only; the model's own plan stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

from torch import nn

from adaattn_hf.attention.listeners import SEATED, Seat, Seated, seating
from adaattn_hf.plans.plan import Plan, PlanError

from ..models.support import Holder, model_in, refuse_other_attention
from .attach import programs_for
from .door import door_of

MOST = 8
"""Plans per model whose checks are remembered, the newest ones."""
_checked: WeakKeyDictionary[nn.Module, list[tuple[Plan, bool, object, dict[nn.Module, Seat]]]] = WeakKeyDictionary()
_open: Counter[nn.Module] = Counter()
_lock = Lock()


@contextmanager
def use_plan(model: Holder, plan: Plan | str | Path | None, *, unverified: bool = False) -> Iterator[None]:
    """Runs a model by another plan inside the `with` block, or exactly; its own plan stays and is back behind it.

    The block belongs to the thread, or the asyncio task, that opens it: two requests may run one model by two plans at
    once. Blocks nest, the innermost holds, and an exception leaves nothing behind. Whatever calls the model inside
    the block is served: `generate`, pipelines, a named backend, every cache. `config.adaattn["monitor"]` rests
    meanwhile; `explain` and `plan_of` go on to speak of the model's own plan.

    Not served, and refused by name: a model in training mode, whose layers may be computed again behind the block;
    `generate_batch`, which has a thread of its own; and graphs of `torch.compile(fullgraph=True)` that are called while
    a block is open for their model (without `fullgraph` its attention runs outside the graphs meanwhile).

    Args:
        model: A model whose attention implementation is one of ours, or what holds it (a pipeline, PEFT,
            sentence-transformers).
        plan: A plan (see `Plan.from_pretrained`), or None for exact attention in every layer. The same object is
            checked once.
        unverified: Run the plan though held-out text has not shown it good.

    Raises:
        PlanError: The plan does not belong to the model, or the model runs another attention.
    """
    held = model_in(model)
    refuse_other_attention(held, PlanError)
    seats = _seats(held, plan, unverified)
    with _marked(seats), seating(seats):
        yield


def _seats(model: nn.Module, plan: Plan | str | Path | None, unverified: bool) -> Mapping[nn.Module, Seat]:
    seats = {m: Seat({}) for m in model.modules() if m is not model and hasattr(m, "config")}
    if plan is None:
        return seats
    plan = Plan.from_pretrained(plan)
    known, stamp = _checked.setdefault(model, []), door_of(model).now().stamp
    for checked, allowed, at, planned in known:
        if checked is plan and allowed is unverified and at is stamp:
            return seats | planned
    raw, programs = programs_for(model, plan, unverified=unverified)
    planned = {module: Seat(raw) for module, _ in programs.values()}
    known.append((plan, unverified, stamp, planned))
    del known[:-MOST]
    return seats | planned


@contextmanager
def _marked(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Marks modules, for compiled graphs, as having a block open in some thread; the last block removes the mark."""
    marked = list(modules)
    with _lock:
        _open.update(marked)
        for module in marked:
            module.__dict__[SEATED] = Seated()
    try:
        yield
    finally:
        with _lock:
            for module in marked:
                _open[module] -= 1
                if not _open[module]:
                    del _open[module]
                    module.__dict__.pop(SEATED, None)
