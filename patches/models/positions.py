"""How many tokens a model can read, by its learned positions and its configurations, which are collected here."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

LEARNED = ("position_embeddings", "wpe", "embed_positions")
"""Names of learned position embeddings in models."""
COUNT_FROM_BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Model types whose first position is the one behind that of the padding token."""


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Returns the configurations of modules, each once."""
    configs = {id(config): config for part in modules if (config := getattr(part, "config", None)) is not None}
    return [*configs.values()]


def trained_positions(config: Any) -> int | None:
    """Returns how many tokens a model was made for by its configuration, `None` where that does not say."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        return None
    return positions - (text.pad_token_id or 0) - 1 if text.model_type in COUNT_FROM_BEHIND_PADDING else positions


def stated_positions(config: Any) -> int | None:
    """Returns the same, or more where scaled rotary embeddings (`rope_parameters`) reach further."""
    positions = trained_positions(config)
    if positions is None:
        return None
    scaled = [rope for rope in ropes_of(config.get_text_config()) if isinstance(rope.get("factor"), int | float)]
    reached = (int(rope["factor"] * (rope.get("original_max_position_embeddings") or positions)) for rope in scaled)
    return max([positions, *reached])


def longest_input(model: nn.Module) -> int | None:
    """Returns the longest input that a model can read, `None` where nothing says."""
    limits = (learned_positions(model), stated_positions(model.config))
    return min((count for count in limits if count is not None), default=None)


def ropes_of(config: Any) -> list[Mapping[str, Any]]:
    """Returns what a configuration says of its rotary embeddings: one record, or one for each kind of layer."""
    records = (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None))
    nested = [(record, *record.values()) for record in records if isinstance(record, Mapping)]
    return [rope for ropes in nested for rope in ropes if isinstance(rope, Mapping)]


def set_by_length(rope_type: Any) -> bool:
    """Whether Transformers sets the frequencies of rotary embeddings of a type anew in each pass, by its length."""
    return "dynamic" in str(rope_type) or rope_type == "longrope"


def learned_positions(model: nn.Module) -> int | None:
    """Returns the longest input of a model with learned position embeddings, `None` for other models."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LEARNED and isinstance(module, nn.Embedding):
            # RoBERTa and related models start counting after the padding token's index, OPT at an offset
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - int(getattr(module, "offset", before))
    return None
