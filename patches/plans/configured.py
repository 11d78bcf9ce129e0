"""What a proof rests on beside weights: the settings of a model's configuration by which it computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from adaattn_hf.plans.record import PlanError

_SILENT = frozenset((
    "adaattn", "architectures", "auto_map", "cache_implementation", "chunk_size_feed_forward", "distributed_config",
    "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "label2id", "name_or_path", "num_labels",
    "prefix", "problem_type", "quantization_config", "return_dict", "task_specific_params", "tie_word_embeddings",
    "tokenizer_class", "torch_dtype", "torchscript", "training", "transformers_version", "transformers_weights",
    "use_cache", "use_return_dict", "vocabulary_map",
))  # fmt: skip
"""Settings that change nothing that a plan is proven for: names, labels, heads, what weights and dtype say."""
_SILENT_WORDS = (
    "dropout", "layerdrop", "drop_path", "token_id", "initializer", "init_std", "aux_loss", "output_",
    "base_model_",
)  # fmt: skip
"""What others have in their names: training, special tokens, what is returned, how work is spread."""


def computes_by(config: Any) -> dict[str, Any]:
    """Returns the settings of a configuration that may change what its model computes, as JSON data.

    Configurations of other towers within it are not among them.
    """
    return {
        name: json.loads(json.dumps(value))
        for name, value in sorted(vars(config).items())
        if not (name.startswith("_") or name in _SILENT or any(word in name for word in _SILENT_WORDS))
        and _plain(value)
    }


def _plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and _plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def refuse_other_configuration(planned: Mapping[str, Any], config: Any) -> None:
    """Refuses a model that computes by other settings, in a configuration or by name, than a plan was proven for.

    Settings that only one of them has are those of another version, and are not compared.

    Raises:
        PlanError: A setting differs.
    """
    own = config if isinstance(config, dict) else computes_by(config)
    for name, value in planned.items():
        if name in own and own[name] != value:
            raise PlanError(
                f"{name}: the plan was verified for a model with {value!r:.300}, this one has {own[name]!r:.300}; undo "
                "that change, or calibrate again"
            )
