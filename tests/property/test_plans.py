"""Random plans over random calls: what runs is the definition, and a traced graph computes the same."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.choices import Choice, Window
from adaattn_hf.plans.plan import LayerPlan
from adaattn_hf.plans.tensors import LayerTensors

from ..support import planned as support
from ..support.planned import Planned, judge, planned


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(call=planned())
def test_a_plan_computes_its_definition_traced_or_not(call: Planned) -> None:
    assert judge(call)


def test_the_judgement_notices_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    call = AttentionCall(
        torch.randn(1, 2, 40, 8), torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8),
        MaskStructure(1, 40, 40, causal=True), 0.3,
    )  # fmt: skip
    narrow, wide = (BoundLayer(LayerPlan(0, "", (Choice.of(Window(w, 1)),)), LayerTensors(), 99) for w in (5, 9))
    assert judge(Planned(narrow, call, "eager")) == "served"
    run = execute.attend
    with monkeypatch.context() as patch:
        patch.setattr(execute, "attend", lambda _, *a: run(wide, *a))
        with pytest.raises(AssertionError, match="off by"):
            judge(Planned(narrow, call, "eager"))
    later = call.structure.with_changes(q_offset=2)
    monkeypatch.setattr(support, "as_traced", lambda r: replace(r, structure=later))
    with pytest.raises(AssertionError, match="from a dense mask: off by"):
        judge(Planned(narrow, call, "eager"))
