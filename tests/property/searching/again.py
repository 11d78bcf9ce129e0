"""Calls made once more with other tensors, which nothing remembered may answer, or of many kinds by threads at once."""

import random
import sys
import threading
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from adaattn_hf.backends import select
from adaattn_hf.patches.mask.structured_mask import StructuredMask
from tests.support import malformed
from tests.support.calls import DEFAULTS, calls
from tests.support.doors import HUB
from tests.support.malformed import TENSOR_CHANGES, Call, Shown

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
    call = draw(calls(longest=31, extras=False))
    mask = StructuredMask(call.structure, torch.device("cpu")) if draw(st.integers(0, 2)) == 0 else None
    given = {"query": call.query, "key": call.key, "value": call.value}
    first = Call(draw(st.sampled_from(DOORS)), {**given, "attention_mask": mask, "scaling": call.scaling})
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


@st.composite
def crowds(draw: st.DrawFn) -> list[Call]:
    """Calls of several kinds, which threads make at once, each in an order of its own."""
    crowd = []
    for _ in range(8):
        call = draw(calls(longest=31, extras=False))
        mask = StructuredMask(call.structure, torch.device("cpu"))
        given = {"query": call.query, "key": call.key, "value": call.value, "attention_mask": mask}
        crowd.append(Call(draw(st.sampled_from([None, "eager"])), given | {"scaling": call.scaling}))
    return crowd


def judge_crowd(calls: list[Call], threads: int = 4, remembered: int = 3) -> str:
    """`served`; fails where a thread got another answer than a single one gets, or an error."""
    assert [malformed.judge(call) for call in calls] == ["served"] * len(calls)
    alone = [malformed.asked(call, call.backend) for call in calls]
    wrong: list[str] = []

    def work(seed: int) -> None:
        order = list(enumerate(calls)) * 4
        random.Random(seed).shuffle(order)
        try:
            answers = [(at, malformed.asked(call, call.backend)) for at, call in order]
        except Exception as error:  # whichever it is, one thread alone has none
            wrong.append(repr(error))
            return
        near = [torch.allclose(out, alone[at], atol=1e-5, equal_nan=True) for at, out in answers]
        wrong.extend(["another answer"] * near.count(False))

    before, most = sys.getswitchinterval(), select.MAX_KINDS
    crowd = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    select.MAX_KINDS = remembered
    select.plain_kernels.clear()
    sys.setswitchinterval(1e-6)
    try:
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
    finally:
        select.MAX_KINDS = most
        sys.setswitchinterval(before)
    assert not wrong, f"{len(wrong)} times in threads: {wrong[0]}"
    return "served"
