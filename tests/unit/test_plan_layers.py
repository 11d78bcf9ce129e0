"""The model of an attention layer is the one that runs it."""

from typing import Any

from torch import nn

from adaattn_hf.patches.plans.layers import running_model

from ..support.models import fresh_pair, tokens


def test_the_outermost_model_that_runs_a_layer_is_found() -> None:
    model, found = fresh_pair("llama").ours, list[Any]()
    layer = model.model.layers[1].self_attn
    layer.register_forward_pre_hook(lambda module, _: found.append(running_model(module)))
    nn.ModuleList([model])[0](tokens())
    model.model(tokens())
    assert [*map(id, found)] == [id(model), id(model.model)]


def test_a_layer_that_runs_by_itself_has_none() -> None:
    assert running_model(nn.Linear(2, 2)) is None
    assert running_model(fresh_pair("llama").ours.model.layers[0].self_attn) is None
