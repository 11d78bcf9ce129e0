"""What a plan's verdict rests on beside weights: the settings of a model's configuration by which it computes."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from adaattn_hf.plans.limits import MODEL
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.record import PlanError

_SILENT = frozenset((
    "adaattn", "architectures", "auto_map", "cache_implementation", "chunk_size_feed_forward", "distributed_config",
    "dtype", "finetuning_task", "gradient_checkpointing", "id2label", "label2id", "name_or_path", "num_labels",
    "prefix", "problem_type", "quantization_config", "return_dict", "task_specific_params", "tie_word_embeddings",
    "tokenizer_class", "torch_dtype", "torchscript", "training", "transformers_version", "transformers_weights",
    "use_cache", "use_return_dict", "vocabulary_map",
))  # fmt: skip
"""Settings that change nothing that a plan is verified for: names, labels, heads, what weights and dtype say."""
_SILENT_WORDS = (
    "dropout", "layerdrop", "drop_path", "token_id", "initializer", "init_std", "aux_loss", "output_",
    "base_model_",
)  # fmt: skip
"""What others have in their names: training, special tokens, what is returned, how work is spread."""

_SIZES = frozenset((
    "d_model", "head_dim", "hidden_size", "intermediate_size", "model_type", "n_embd", "n_head", "n_inner", "n_layer",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size",
))  # fmt: skip
"""Settings of which no model has two values: where one of them differs, it is another model."""
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""What families call their number of layers."""


def computes_by(config: Any) -> dict[str, Any]:
    """Returns the settings of a configuration that may change what its model computes, as JSON data.

    Configurations of other towers within it are not among them.
    """
    settings: dict[str, Any] = {}
    for name, value in sorted(vars(config).items()):
        if not (name.startswith("_") or name in _SILENT or any(word in name for word in _SILENT_WORDS)):
            with suppress(TypeError):  # no JSON data: tensors, functions, other configurations
                settings[name] = json.loads(json.dumps(value))
    return settings


def other_model(plan: Plan, config: Any) -> str | None:
    """Returns in words that a configuration is of another model than a plan: both names, and a setting that differs."""
    settings = {**computes_by(config), "model_type": config.model_type}
    for name, there in {"model_type": plan.model_type, **plan.configuration}.items():
        if name in _SIZES and settings.get(name, there) != there:
            differs = f"{name.replace('_', ' ')} {there} there, {settings[name]} here"
            planned_for = plan.protocol.get(MODEL, plan.model_type)
            return f"a plan of {planned_for}; {name_of_model(config)} is another model ({differs})"
    return None


def refuse_other_settings(planned: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuses settings that differ from those of a plan by the same names (PlanError).

    Those that only one of them has are of another version, and are not compared.
    """
    for name, value in planned.items():
        if name in settings and settings[name] != value:
            raise PlanError(
                f"{name}: the plan was verified for a model with {value!r:.300}, this one has {settings[name]!r:.300}; "
                f"undo that change{' (assistant_early_exit?)' * (name in _DEPTHS)}, or calibrate again"
            )


def name_of_model(model: Any) -> str:
    """Returns the name that a model or configuration was loaded by: a hub id, or the last part of a directory."""
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    path = Path(name)
    if not path.exists():
        return name
    whole = path.resolve()
    # a copy in the hub's cache lies in models--owner--name/snapshots/COMMIT
    cached = whole.parents[1].name if whole.parent.name == "snapshots" else ""
    return "/".join(cached.split("--")[1:]) if cached.startswith("models--") else whole.name
