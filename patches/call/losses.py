"""Which keywords are options of a loss: they pass through attention on their way, and change nothing there.

A model hands the keywords of its forward to its layers and to its loss alike. So what a loss takes is no secret of
attention's: it stands in the signatures of Transformers' losses, and of those that users give to their models.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_SET = "_loss_function"
"""Where a Transformers model keeps the function that was assigned to its `loss_function`."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes(name: str) -> bool:
    """Whether a loss takes a keyword: one of Transformers' own, or one that a model of this process was given.

    Of Transformers' own losses the optional parameters count; the others are what the model itself passes. Which model
    a call belongs to its attention cannot tell, so that the losses of all models count.
    """
    return name in _of_transformers() or any(name in _parameters(loss) for loss in _of_users())


@functools.cache
def _of_transformers() -> frozenset[str]:
    """Options of the losses of the installed Transformers, which a model has imported."""
    module = sys.modules.get("transformers.loss.loss_utils")
    if module is None:
        return frozenset()
    losses: Iterable[Callable[..., Any]] = (*module.LOSS_MAPPING.values(), module.fixed_cross_entropy)
    return frozenset().union(*(_parameters(loss, optional=True) for loss in losses))


def _of_users() -> list[Any]:
    """The losses that users gave to models which are alive."""
    models = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    return [vars(model)[_SET] for model in models if _SET in vars(model)]


def _parameters(loss: Any, *, optional: bool = False) -> set[str]:
    """Names that a function can be called with; none of one that does not tell."""
    try:
        found = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return set()
    named = (one for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    return {one.name for one in named if not optional or one.default is not one.empty}
