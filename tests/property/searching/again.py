"""Calls that are made once more with something else about their tensors: what is remembered must not answer them."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from adaattn_hf.patches.mask.structured_mask import StructuredMask
from tests.support import malformed
from tests.support.doors import HUB
from tests.support.malformed import TENSOR_CHANGES, Call, Shown
from tests.support.requests import DEFAULTS, requests

CHANGES = (
    *["on meta"] * 6, "in float16", "in bfloat16", "in float64", "a parameter", "sparse", "negated lazily",
    "backwards along 2", "every other along 3", "repeated along 1",
)  # fmt: skip
"""What a tensor may become besides another one of its kind; most often one without memory."""
DOORS = (None, "native", "sdpa", "eager", HUB)


@dataclass(repr=False)
class Again(Shown):
    """A call, and the one that follows it."""

    first: Call
    then: Call

    def __repr__(self) -> str:
        return f"Again({self.first!r}, then {self.then.changes})"


@st.composite
def repeated(draw: st.DrawFn) -> Again:
    """A valid call, made anew with some of its tensors changed; most calls are of the kinds that are remembered."""
    request = draw(requests(longest=31, extras=False))
    structure, mask = request.structure, None
    if draw(st.integers(0, 2)) == 0:
        mask = StructuredMask(structure, torch.device("cpu"))
    given = {"query": request.query, "key": request.key, "value": request.value}
    first = Call(draw(st.sampled_from(DOORS)), {**given, "attention_mask": mask, "scaling": request.scaling})
    first.default = draw(st.sampled_from(DEFAULTS))
    then = replace(first, given=dict(first.given), changes=[])
    names = list(given) if draw(st.integers(0, 3)) == 0 else [draw(st.sampled_from(list(given)))]
    change = draw(st.sampled_from(CHANGES))
    for name in names:
        then.given[name] = TENSOR_CHANGES[change](then.given[name])
        then.changes.append(f"{name} {change}")
    return Again(first, then)


def judge(call: Again) -> str:
    """The verdict on the second call in a word, as of any other that may be malformed."""
    for _ in range(2):
        assert malformed.judge(call.first) == "served"
    return malformed.judge(call.then)
