"""Valid calls of the attention function, drawn by hypothesis, and their judgement by double precision."""

from dataclasses import dataclass, replace

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from .doors import HUB, door
from .malformed import Layer, Shown
from .requests import DEFAULTS, HALF, assert_right, assert_right_gradients, default_dtype, refuses, requests, words_of


@dataclass(repr=False)
class Valid(Shown):
    """A request, the backend that is named for it, whether its gradients are compared, and torch's default dtype."""

    request: AttentionCall
    backend: str | None
    gradient: bool
    default: torch.dtype

    def __repr__(self) -> str:
        words = f"{words_of(self.request)}, default {self.default}"
        return f"Valid({self.backend}, {words}, gradient={self.gradient})"


@st.composite
def calls(draw: st.DrawFn, doors: tuple[str | None, ...] = (None, "native", "sdpa", "eager")) -> Valid:
    backend = draw(st.sampled_from(doors))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, *HALF]))
    request = draw(requests(dtype=dtype, longest=70))
    assume(backend in (None, HUB) or not refuses(backend, request))
    gradient = dtype not in HALF and draw(st.integers(0, 2)) == 0
    return Valid(replace(request, need_lse=False), backend, gradient, draw(st.sampled_from(DEFAULTS)))


def answer(request: AttentionCall, backend: str | None) -> Tensor:
    given = {"softcap": request.softcap, "s_aux": request.sink_logits, "position_bias": request.bias}
    out: Tensor = door(backend)(
        Layer(1), request.query, request.key, request.value,
        StructuredMask(request.structure, torch.device("cpu")), scaling=request.scaling,
        **{name: value for name, value in given.items() if value is not None},
    )[0]  # fmt: skip
    return out


def judge(call: Valid) -> str:
    """`served`; fails where the output, or a gradient, is not that of the reference."""
    request = call.request
    if call.gradient:
        with default_dtype(call.default):
            assert_right_gradients(request, lambda asked: answer(asked, call.backend))
        return "served"
    with torch.no_grad(), default_dtype(call.default):
        found = answer(request, call.backend)
    assert found.dtype == request.query.dtype
    assert_right(request, found)
    return "served"
