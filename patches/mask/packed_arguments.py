"""What the caller of a model said of packed documents, where the model keeps it from its mask or from attention."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from torch import nn

from ..models.cache_keyword import CACHE_KEYWORDS, arguments_of


def caller_arguments() -> tuple[bool, dict[str, Any]]:
    """Looks up what the model that makes a mask was called with; asked by the mask function alone.

    Returns whether it is a call without a mask and without a cache, and its arguments by name, none where no model is
    found. In Transformers positions that fall back tell documents in such calls alone; an empty cache is one, too.

    Transformers hands a mask function sizes, a padding mask and the configuration, and attention what the model passes
    on. A few families pass on no lengths, make their masks without positions, or make a mask of ones themselves, and an
    empty cache leaves no trace in sizes. No argument and no documented hook of theirs tells the rest for a model that
    is only loaded by `attn_implementation`. So the call stack is read, from the mask function to the call of the model.
    """
    # what calls the mask function: in Transformers it has the cache among its arguments
    caller = sys._getframe(2)
    variables = caller.f_locals
    caches = [variables[name] for name in CACHE_KEYWORDS if name in variables]
    model: Any = None
    frame: FrameType | None = caller
    while frame is not None:
        variables, frame = frame.f_locals, frame.f_back
        owner = variables.get("self", model)
        if model is None and isinstance(owner, nn.Module):
            model = owner
        if owner is not model:
            break
        # a call around the model's forward, which itself may have set its arguments anew
        if model is not None and {"self", "args", "kwargs"} <= variables.keys():
            arguments = arguments_of(inspect.signature(type(model).forward), variables["args"], variables["kwargs"])
            bare = len(caches) == 1 and caches[0] is None and arguments.get("attention_mask") is None
            return bare, arguments
    return False, {}
