"""What the caller of a model said of packed documents, where the model keeps it from its mask or from attention."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from adaattn_hf.attention.structure import MaskStructure

from ..models.cache_keyword import CACHE_KEYWORDS, arguments_of
from .documents import with_documents, with_restarts


class PackedArguments(NamedTuple):
    """`cu_seq_lens_*` and `position_ids` of the call, and whether it is `bare`, without a mask and without a cache.

    In Transformers positions that fall back tell documents in bare calls alone; an empty cache is one, too.
    """

    bare: bool = False
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    positions: Tensor | None = None

    def added_to(self, structure: MaskStructure) -> MaskStructure:
        """The structure with the borders that lengths tell, or else positions."""
        if self.cu_q is not None:
            return with_documents(structure, self.cu_q, self.cu_q if self.cu_k is None else self.cu_k)
        return with_restarts(structure, self.positions) if self.bare and self.positions is not None else structure


def caller_arguments() -> PackedArguments:
    """Looks up what the model that makes a mask was called with; asked by the mask function alone.

    Transformers hands a mask function sizes, a padding mask and the configuration, and attention what the model passes
    on. A few families pass on no lengths, make their masks without positions, or make a mask of ones themselves, and an
    empty cache leaves no trace in sizes. No argument and no documented hook of theirs tells the rest for a model that
    is only loaded by `attn_implementation`. So the call stack is read, from the mask function to the call of the model.
    """
    # what calls the mask function: in Transformers it has the cache among its arguments
    caller = sys._getframe(2)
    inside = caller.f_locals
    caches = [inside[name] for name in CACHE_KEYWORDS if name in inside]
    model: Any = None
    frame: FrameType | None = caller
    while frame is not None:
        inside, frame = frame.f_locals, frame.f_back
        owner = inside.get("self", model)
        if model is None and isinstance(owner, nn.Module):
            model = owner
        if owner is not model:
            break
        # a call around the model's forward, which itself may have set its arguments anew
        if model is not None and {"self", "args", "kwargs"} <= inside.keys():
            said = arguments_of(inspect.signature(type(model).forward), inside["args"], inside["kwargs"])
            bare = len(caches) == 1 and caches[0] is None and said.get("attention_mask") is None
            return PackedArguments(bare, *map(said.get, ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids")))
    return PackedArguments()
