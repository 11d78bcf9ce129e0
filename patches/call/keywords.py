"""The keywords that reach an attention function: harmless ones, options of a loss, and those that change the result.

A model hands the keywords of its forward to its layers and to its loss alike. So what a loss takes is no secret of
attention's: it stands in the signatures of Transformers' losses, and of those that users give to their models.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

_HARMLESS = """
use_cache cache_position past_key_value past_key_values past_key_values_length position_embeddings layer_idx
max_length_q max_length_k seq_idx deterministic attn_implementation query_length is_training return_dict
output_hidden_states output_router_logits num_items_in_batch logits_to_keep num_logits_to_keep return_loss labels
shift_labels loss_weights next_sentence_label start_positions end_positions input_ids inputs_embeds decoder_input_ids
decoder_inputs_embeds decoder_position_ids token_type_ids mm_token_type_ids task_type_ids encoder_outputs
encoder_hidden_states encoder_attention_mask interpolate_pos_encoding pixel_values pixel_values_videos pixel_mask
pixel_attention_mask image_sizes image_grid_thw video_grid_thw grid_thw second_per_grid_ts spatial_shapes
vision_feature_layer vision_feature_select_strategy image_embeds image_hidden_states input_features input_values
feature_attention_mask audio_feature_lengths use_audio_in_video generation_mode length lengths seq_lengths
special_tokens_mask offset_mapping overflow_to_sample_mapping assistant_masks completion_mask prompt_mask tokenizer
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keywords that reach attention but do not change it: inputs and labels of the model, switches of its outputs, columns
of batches, and sizes that only other kernels need. Options of a loss do not either: `takes` knows those. Any
other keyword that is not supported is refused."""

PAGED = ("block_table", "cache", "read_index")
"""Keywords of continuous batching, whose keys and values lie in a paged cache; `batching` serves such calls."""
MEANT = frozenset((
    *PAGED, "cu_seq_lens_q", "cu_seq_lens_k", "indices", "block_indices", "output_attentions", "position_ids"
))  # fmt: skip
"""Keywords that may change what is computed; `position_ids` do so in some model families only."""
KNOWN = HARMLESS | MEANT

_SET = "_loss_function"
"""Where a Transformers model keeps the function that was assigned to its `loss_function`."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes(name: str) -> bool:
    """Whether a loss takes a keyword: one of Transformers' own, or one that a model of this process was given.

    Of Transformers' own losses the optional parameters count; the others are what the model itself passes. Which model
    a call belongs to its attention cannot tell, so that the losses of all models count.
    """
    return name in _of_transformers() or any(name in _parameters(loss) for loss in _of_users())


@functools.cache
def _of_transformers() -> frozenset[str]:
    """Options of the losses of the installed Transformers, which a model has imported."""
    module = sys.modules.get("transformers.loss.loss_utils")
    if module is None:
        return frozenset()
    losses: Iterable[Callable[..., Any]] = (*module.LOSS_MAPPING.values(), module.fixed_cross_entropy)
    return frozenset().union(*(_parameters(loss, optional=True) for loss in losses))


def _of_users() -> list[Any]:
    """The losses that users gave to models which are alive: objects that refer to their classes.

    The list of `gc.get_objects` refers to tuples that other threads are making, in which Python then raises.
    """
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return []
    kinds = [module.PreTrainedModel]
    for kind in kinds:
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    models = (thing for thing in gc.get_referrers(*kinds) if issubclass(type(thing), kinds[0]))
    return [vars(model)[_SET] for model in models if _SET in vars(model)]


def _parameters(loss: Any, *, optional: bool = False) -> set[str]:
    try:
        found = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return set()
    named = (one for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    return {one.name for one in named if not optional or one.default is not one.empty}
