"""What a cell of whole models does, for one implementation: a function without arguments that does it once."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

import adaattn_hf
from adaattn_hf.patches.models.cache_keyword import with_cache

from .grid import Cell
from .work import Work, padding_of


def model_works(cell: Cell, models: Mapping[str, Any], device: torch.device) -> Callable[[str], Work]:
    """Makes of an implementation's name a pass of a model with random weights, the same for every implementation.

    A cell with `kv_len` is one decode step behind that many keys. The past stays as long as it is: what a step appends
    is taken back, which costs no cache anything.
    """
    recipe = models[str(cell.model)]
    dtype = getattr(torch, cell.dtype)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, recipe.get("ids", 1000), (cell.batch, cell.q_len), generator=random, device="cpu").to(device)
    padding = padding_of(cell, device)
    weights: dict[str, Tensor] = {}
    pasts: list[Tensor] = []

    def model_of(implementation: str) -> transformers.PreTrainedModel:
        config = getattr(transformers, recipe["config"])(**recipe["arguments"])
        torch.manual_seed(0)
        kind = getattr(transformers, recipe["class"])
        with device:  # where random weights are drawn in no time
            model = kind._from_config(config, attn_implementation=implementation, dtype=dtype).to(device).eval()
        if weights:
            # one set of weights in memory for all
            model.load_state_dict(weights, assign=True)
            model.tie_weights()
        else:
            weights.update(model.state_dict())
        if cell.prepared and implementation.startswith("adaattn"):
            model = adaattn_hf.prepare(model)
        return model  # type: ignore[no-any-return]

    def make(implementation: str) -> Work:
        model = model_of(implementation)
        if cell.kv_len is not None:
            return _step(cell, model, ids, pasts)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": padding}
        if recipe["causal"]:
            inputs["use_cache"] = cell.cached
        if cell.cached:
            inputs["logits_to_keep"] = 1
        if cell.gradient:
            hidden = torch.zeros_like(ids, dtype=torch.bool) if padding is None else ~padding
            inputs["labels"] = ids.masked_fill(hidden, -100)

        def work() -> Any:
            with torch.set_grad_enabled(cell.gradient):
                output = model(**inputs)
            if cell.gradient:
                output.loss.backward()
                model.zero_grad()
                return output.loss.detach()
            return output.logits if hasattr(output, "logits") else output.last_hidden_state

        return work

    return make


def _step(cell: Cell, model: transformers.PreTrainedModel, ids: Tensor, pasts: list[Tensor]) -> Work:
    config: Any = model.config
    if not pasts:
        random = torch.Generator(ids.device).manual_seed(1)
        head_dim = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, cell.batch, config.num_key_value_heads, cell.keys, head_dim)
        pasts += torch.randn(shape, generator=random, dtype=model.dtype, device=ids.device)
    prepared = cell.prepared and config._attn_implementation.startswith("adaattn")
    cache: Any = (adaattn_hf.GrowingCache if prepared else transformers.DynamicCache)(config=config)
    with torch.no_grad():
        for layer, (keys, values) in enumerate(pasts):
            cache.update(keys, values, layer)

    cached = with_cache(model, cache)

    def work() -> Any:
        with torch.no_grad():
            logits = model(ids, use_cache=True, **cached).logits
            cache.crop(-cell.q_len)
        return logits

    return work
