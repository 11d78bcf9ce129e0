"""Tiny configurations of every family that is tested: `tests/model/breadth.yaml` and the usual sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf
import yaml
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .models import Pair, build

LISTED: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (Path(__file__).parents[1] / "model" / "breadth.yaml").read_text(encoding="utf-8")
)
ROUTED_SINCE = {"gptj": Version("5.24")}
"""Families that took no attention by its name before some version of Transformers."""
ROUTED = [family for family, since in ROUTED_SINCE.items() if Version(tf.__version__) >= since]
for _family in set(ROUTED_SINCE).difference(ROUTED):
    del LISTED["decoders"][_family]
USUAL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
    type_vocab_size=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    cls_token_id=1,
    sep_token_id=2,
    decoder_start_token_id=0,
    embedding_size=32,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    dim=32,
    n_layers=2,
    n_heads=4,
    hidden_dim=48,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    image_size=16,
    patch_size=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    dropout_rate=0.0,
)
"""Sizes and switches that a configuration takes where it knows the name."""

MLA: dict[str, Any] = dict(
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    head_dim=8,
    v_head_dim=12,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=2,
)


def configured(model_type: str, changes: dict[str, Any]) -> tf.PreTrainedConfig:
    """A tiny configuration."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} has no {model_type}")
    known = tf.AutoConfig.for_model(model_type)
    usual = {name: value for name, value in USUAL.items() if hasattr(known, name)}
    if hasattr(known, "kv_lora_rank"):
        usual |= MLA
    return tf.AutoConfig.for_model(model_type, **{**usual, **changes})


def models(model_type: str, changes: dict[str, Any], auto: Any, implementation: str = "adaattn") -> Pair:
    """The tiny model of a family, under stock eager attention and under ours, or another one that is named."""
    config = configured(model_type, changes)
    cls = auto._model_mapping[type(config)]
    return build(cls[0] if isinstance(cls, (list, tuple)) else cls, config, implementation)
