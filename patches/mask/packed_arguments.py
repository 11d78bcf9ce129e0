"""Looks up what the caller of a model said of packed documents, where the model keeps it from its mask or attention."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from adaattn_hf.attention.structure import CallStructure

from ..models.cache_keyword import CACHE_KEYWORDS
from .documents import with_documents


class Told(NamedTuple):
    """What the caller said of packed documents, where the model does not tell its mask or its attention.

    By positions where the model was given no mask, and has no cache, be it an empty one; or by `cu_seq_lens_*`.
    """

    by_positions: bool = False
    cu_seq_lens: tuple[Tensor | None, Tensor | None] = (None, None)

    def added_to(self, structure: CallStructure) -> CallStructure:
        """The structure with the borders that lengths tell."""
        cu_q, cu_k = self.cu_seq_lens
        return structure if cu_q is None else with_documents(structure, cu_q, cu_q if cu_k is None else cu_k)


def told_to_model() -> Told:
    """Looks up what the model that makes a mask was called with; asked by the mask function alone.

    A mask function does not hear of it: a model may make a mask of ones itself, and an empty cache leaves no trace in
    lengths. So the call stack is asked, as far as it leads from the mask function to the model. What it does not show
    is not told.
    """
    # what calls the mask function: in Transformers it has the cache among its arguments
    maker: FrameType = sys._getframe(2)
    caches = [maker.f_locals[name] for name in CACHE_KEYWORDS if name in maker.f_locals]
    frame: FrameType | None = maker
    model: Any = None
    while frame is not None and not isinstance(model := frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    while frame is not None and frame.f_locals.get("self", model) is model:
        inside, frame = frame.f_locals, frame.f_back
        # a call around the model's forward, which itself may have set its argument anew
        if {"self", "args", "kwargs"} <= inside.keys():
            signature = inspect.signature(type(model).forward)
            passed = signature.bind_partial(model, *inside["args"], **inside["kwargs"]).arguments
            rest = passed.get("kwargs", {})
            return Told(
                len(caches) == 1 and caches[0] is None and passed.get("attention_mask") is None,
                (rest.get("cu_seq_lens_q"), rest.get("cu_seq_lens_k")),
            )
    return Told()
