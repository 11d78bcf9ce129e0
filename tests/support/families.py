"""Tiny configurations of every family that is tested: `tests/model/breadth.yaml` and the usual sizes."""

from pathlib import Path
from typing import Any

import pytest
import transformers as tf
import yaml
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .models import Pair, build, sized
from .versions import HERE

LISTED: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (Path(__file__).parents[1] / "model" / "breadth.yaml").read_text(encoding="utf-8")
)
ROUTED_SINCE = {"gptj": Version("5.24")}
"""Families that took no attention by its name before some version of Transformers."""
ROUTED = [family for family, since in ROUTED_SINCE.items() if since <= HERE]
for _family in set(ROUTED_SINCE).difference(ROUTED):
    del LISTED["decoders"][_family]


def configured(model_type: str, changes: dict[str, Any]) -> tf.PreTrainedConfig:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} has no {model_type}")
    return sized(CONFIG_MAPPING[model_type], changes)


def models(model_type: str, changes: dict[str, Any], auto: Any, implementation: str = "adaattn") -> Pair:
    """The tiny model of a family, under stock eager attention and under ours, or another one that is named."""
    config = configured(model_type, changes)
    cls = auto._model_mapping[type(config)]
    return build(cls[0] if isinstance(cls, (list, tuple)) else cls, config, implementation)


def sharing(name: str) -> Pair:
    """A model of four layers, of which the last two read the keys of those before."""
    if not hasattr(tf, f"{name}TextConfig"):
        pytest.skip(f"transformers {tf.__version__} has no {name}")
    sizes: dict[str, Any] = dict(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
    )
    sizes |= dict(head_dim=16, global_head_dim=16, num_global_key_value_heads=2, sliding_window=5, pad_token_id=0)
    sizes |= dict(vocab_size_per_layer_input=97, hidden_size_per_layer_input=8, num_hidden_layers=4)
    sizes |= dict(laurel_rank=4, activation_sparsity_pattern=[0.0] * 4)  # of Gemma 3n
    kinds = ["sliding_attention", "full_attention"] * 2
    config = getattr(tf, f"{name}TextConfig")(**sizes, num_kv_shared_layers=2, layer_types=kinds, eos_token_id=None)
    return build(getattr(tf, f"{name}ForCausalLM"), config)
