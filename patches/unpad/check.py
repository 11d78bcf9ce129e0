"""Whether a model can run without its padding: by its configuration and code, then by a small ragged batch.

The configuration cannot tell everything: a model may mix tokens in ways that no attribute shows. So every model must
compute that batch the same with and without padding before its own is removed.
"""

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.families import refusal_of
from ..models.support import is_ours
from .hooks import Unpadding

_RECURRENT = ("conv", "linear_attention", "hybrid", "hybrid_sliding", "mamba", "recurrent", "short_conv")
_TOWERS = ("vision_config", "audio_config", "text_config", "speech_config", "encoder", "decoder")
# Relative to the largest value; a token at a wrong position, or one that sees another row, is off by far more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}


def unpadding_of(model: PreTrainedModel) -> tuple[Unpadding | None, list[str]]:
    """The hooks that remove a model's padding, not installed yet; None and every reason against them if they cannot."""
    # the base model computes the hidden states; a model without a head is its own
    trunk: Any = model.base_model
    if trunk is model or not isinstance(trunk, PreTrainedModel):
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        trunk = inner[0] if len(inner) == 1 else model
    unpadding = None
    reasons = _shown_by_code(model, trunk)
    if not reasons:
        unpadding = Unpadding(model, trunk)
        reasons = _shown_by_a_batch(unpadding)
    return (None if reasons else unpadding), reasons


def _shown_by_code(model: PreTrainedModel, trunk: PreTrainedModel) -> list[str]:
    config, reasons = trunk.config, list[str]()
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder: cross-attention relates two paddings")
    elif getattr(config, "add_cross_attention", False):
        reasons.append("it has cross-attention")
    towers = [name for name in _TOWERS if hasattr(getattr(config, name, None), "model_type")]
    if towers:
        reasons.append(f"it has several towers ({', '.join(towers)}); prepare the text model alone")
    implementation = getattr(config, "_attn_implementation", None)
    if not is_ours(implementation):
        reasons.append(f"its attention is {implementation!r}; load it with attn_implementation='adaattn'")
    elif refusal_of(type(config)) is not None:
        reasons.append("its attention does not go through Transformers' attention interface")
    recurrent = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind in _RECURRENT})
    if recurrent:
        reasons.append(f"it has layers ({', '.join(recurrent)}) that run from one packed row into the next")
    if any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and max(m.kernel_size) > 1 for m in trunk.modules()):
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
    return reasons


def _shown_by_a_batch(unpadding: Unpadding) -> list[str]:
    # the hooks are registered meanwhile, for the packed form of a ragged batch; training modes are restored
    target = unpadding.top if unpadding.token_wise else unpadding.trunk
    embeddings: Any = target.get_input_embeddings()  # type: ignore[operator]
    # tensors for offloaded weights are sent where they belong by accelerate's hooks
    device = "cpu" if embeddings.weight.is_meta else embeddings.weight.device
    ids = torch.linspace(0, embeddings.num_embeddings - 1, 23, dtype=torch.float32, device="cpu").long()
    for name in ("pad_token_id", "mask_token_id"):  # with tokens that a family counts, rows keep their padding
        token = getattr(unpadding.config, name, None)
        ids = ids[ids != (-1 if token is None else token)]
    ids = ids.repeat(22)[:21].view(3, 7).to(device)
    last = [1] * 5 + [0] * 2 if unpadding.pools == "first" else [0] * 2 + [1] * 5
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4, last], dtype=torch.int64, device=device)
    # all tokens of the base model, whatever its head reads, and packed, however few they are
    pools, least, unpadding.pools, unpadding.least = unpadding.pools, unpadding.least, "", 0
    training = {module: module.training for module in target.modules()}
    target.eval()
    try:
        with torch.no_grad():
            keywords = {"use_cache": False} if unpadding.takes_cache else {}
            padded = target(input_ids=ids, attention_mask=mask, **keywords)
            unpadding.install()
            packed = target(input_ids=ids, attention_mask=mask, **keywords)
    finally:
        unpadding.remove()
        unpadding.pools, unpadding.least = pools, least
        for module, was in training.items():
            module.training = was
        unpadding.calls.clear()
    reasons = []
    for name, expected in padded.items():
        if not isinstance(expected, Tensor) or not expected.is_floating_point():
            continue
        actual, difference = packed.get(name), float("inf")
        if isinstance(actual, Tensor) and actual.shape == expected.shape:
            apart = (actual - expected).abs()
            if expected.shape[:2] == mask.shape:  # outputs at padding are expected to be 0
                apart = torch.where(mask.bool()[..., None], apart, actual.abs())
            difference = float(apart.max() / expected.abs().max().clamp_min(1e-30))
        if not difference <= _TOLERANCE.get(expected.dtype, 0.05):  # true for NaN, too
            reasons.append(
                f"{name} of a test batch differs by {difference:.1e} of its largest value with and without padding"
            )
    return reasons
