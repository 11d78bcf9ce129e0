"""Valid calls of the attention function, drawn by hypothesis, and their judgement by double precision."""

from dataclasses import dataclass, replace

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from .calls import DEFAULTS, HALF, assert_right, assert_right_gradients, default_dtype, refuses, words_of
from .calls import calls as bare_calls
from .doors import HUB, door
from .malformed import Layer, Shown


@dataclass(repr=False)
class Valid(Shown):
    """A call, the backend that is named for it, whether its gradients are compared, and torch's default dtype."""

    call: AttentionCall
    backend: str | None
    gradient: bool
    default: torch.dtype

    def __repr__(self) -> str:
        words = f"{words_of(self.call)}, default {self.default}"
        return f"Valid({self.backend}, {words}, gradient={self.gradient})"


@st.composite
def calls(draw: st.DrawFn, doors: tuple[str | None, ...] = (None, "native", "sdpa", "eager")) -> Valid:
    backend = draw(st.sampled_from(doors))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, *HALF]))
    call = draw(bare_calls(dtype=dtype, longest=70))
    assume(backend in (None, HUB) or not refuses(backend, call))
    gradient = dtype not in HALF and draw(st.integers(0, 2)) == 0
    return Valid(replace(call, need_lse=False), backend, gradient, draw(st.sampled_from(DEFAULTS)))


def answer(call: AttentionCall, backend: str | None) -> Tensor:
    given = {"softcap": call.softcap, "s_aux": call.sink_logits, "position_bias": call.bias}
    out: Tensor = door(backend)(
        Layer(1), call.query, call.key, call.value,
        StructuredMask(call.structure, torch.device("cpu")), scaling=call.scaling,
        **{name: value for name, value in given.items() if value is not None},
    )[0]  # fmt: skip
    return out


def judge(made: Valid) -> str:
    """`served`; fails where the output, or a gradient, is not that of the reference."""
    call = made.call
    if made.gradient:
        with default_dtype(made.default):
            assert_right_gradients(call, lambda asked: answer(asked, made.backend))
        return "served"
    with torch.no_grad(), default_dtype(made.default):
        found = answer(call, made.backend)
    assert found.dtype == call.query.dtype
    assert_right(call, found)
    return "served"
