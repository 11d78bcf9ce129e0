"""The model of an attention layer is found among those that live."""

from __future__ import annotations

import copy
import gc

import pytest
from torch import nn

from adaattn_hf.patches.plans.layers import model_of
from adaattn_hf.plans.plan import PlanError

from ..support.models import fresh_pair


def test_the_outermost_model_that_holds_a_layer_is_found() -> None:
    model = fresh_pair("llama").ours
    twin = copy.deepcopy(model)
    assert model_of(model.model.layers[1].self_attn) is model
    assert model_of(twin.model.layers[1].self_attn) is twin
    wrapped = nn.Sequential(model)
    assert model_of(wrapped[0].model.layers[0].self_attn) is model, "a wrapper is no model of Transformers"


def test_a_layer_of_no_model_has_none() -> None:
    assert model_of(nn.Linear(2, 2)) is None
    layer = fresh_pair("llama").ours.model.layers[0].self_attn  # its model is gone
    gc.collect()
    assert model_of(layer) is None


def test_models_that_cannot_be_asked_are_said() -> None:
    model = fresh_pair("llama").ours
    gc.freeze()
    try:
        with pytest.raises(PlanError, match=r"behind gc.freeze\(\).*load_plan"):
            model_of(model.model.layers[0].self_attn)
    finally:
        gc.unfreeze()
