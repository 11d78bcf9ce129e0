"""Finds reasons why a model cannot run without padding, from its configuration and code, before hooks are added."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..models.families import uses_interface
from ..models.support import is_ours

_RECURRENT = ("conv", "linear_attention", "hybrid", "hybrid_sliding", "mamba", "recurrent", "short_conv")
_TOWERS = ("vision_config", "audio_config", "text_config", "speech_config", "encoder", "decoder")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """The base model, which computes the hidden states; the model itself if it has no head."""
    trunk = model.base_model
    if trunk is not model and isinstance(trunk, PreTrainedModel):
        return trunk
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inner[0] if len(inner) == 1 else model


def refusals(model: PreTrainedModel) -> tuple[str, ...]:
    """Every reason against removing padding that configuration and code show; empty if there is none."""
    trunk = trunk_of(model)
    config = trunk.config
    reasons: list[str] = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder: cross-attention relates two paddings")
    elif getattr(config, "add_cross_attention", False):
        reasons.append("it has cross-attention")
    towers = [name for name in _TOWERS if hasattr(getattr(config, name, None), "model_type")]
    if towers:
        reasons.append(f"it has several towers ({', '.join(towers)}); prepare the text model alone")
    implementation = getattr(config, "_attn_implementation", None)
    if not is_ours(implementation):
        reasons.append(
            f"its attention is {implementation!r}, which does not keep packed tokens of different rows apart; "
            "load it with attn_implementation='adaattn'"
        )
    elif not uses_interface(type(config)):
        reasons.append("its attention does not go through Transformers' attention interface")
    recurrent = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind in _RECURRENT})
    if recurrent:
        reasons.append(f"it has layers ({', '.join(recurrent)}) that run from one packed row into the next")
    if any(isinstance(m, _CONVOLUTIONS) and max(m.kernel_size) > 1 for m in trunk.modules()):
        reasons.append("it has convolutions, which mix neighbouring tokens of different rows")
    if any(hasattr(module, "indexer") for module in trunk.modules()):
        reasons.append("its indexer chooses keys among those of all packed rows")
    if any("relative_attention_bias" in name for name, _ in trunk.named_modules()):
        reasons.append("its attention adds a bias by relative position in the padded batch")
    parameters: dict[str, Any] = dict(inspect.signature(type(trunk).forward).parameters)
    missing = [name for name in ("attention_mask", "position_ids") if name not in parameters]
    reasons += [f"{type(trunk).__name__}.forward takes no {name}" for name in missing]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        reasons.append(f"{type(trunk).__name__}.forward passes no keywords on to attention")
    if trunk is model and model.base_model_prefix and re.search("For[A-Z]", type(model).__name__):
        reasons.append(f"it has a head and no separate base model {model.base_model_prefix!r}")
    return tuple(reasons)
