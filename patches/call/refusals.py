"""What stands before every attention function, of whatever name: keywords, masks, biases, factors, windows, transforms.

The functions that Transformers calls (`interface`, `batching`, and the kernel repositories of `hub/`, into which this
file is copied) ask here before they compute, so that none of them leaves out in silence what another one refuses.

A model hands the keywords of its forward to its layers and to its loss alike. Options of Transformers' losses are in
the list of harmless ones; the keywords of other losses are added by whoever brings the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.call import broadcast_to_scores
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.attention.tracing import transform_at_work
from adaattn_hf.backends.select import BackendRefusal

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
ignore_index reduction sigma zero_infinity auxiliary_loss_weight auxiliary_logits denoising_meta_values
enc_outputs_class enc_outputs_coord enc_outputs_masks enc_topk_bboxes enc_topk_logits encoder_logits encoder_pred_boxes
initial_reference_points outputs_class outputs_coord outputs_masks predicted_corners
"""
IGNORED_KEYWORDS = frozenset(_HARMLESS.split())
"""Keywords that reach attention but do not change it: inputs and labels of the model, switches of its outputs, columns
of batches, sizes that only other kernels need, and (from `ignore_index` on) options of Transformers' losses. Any other
keyword that is neither supported nor allowed is refused."""

DOCUMENTS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k"))
"""Keywords that tell the borders of packed documents."""
PAGED = ("block_table", "cache", "read_index")
"""Keywords of continuous batching, whose keys and values lie in a paged cache; `batching` serves such calls."""
MEANINGFUL_KEYWORDS = frozenset((
    *PAGED, *DOCUMENTS, "indices", "block_indices", "output_attentions", "position_ids"
))  # fmt: skip
"""Keywords that may change what is computed; `position_ids` do so in some model families only."""
KNOWN_KEYWORDS = IGNORED_KEYWORDS | MEANINGFUL_KEYWORDS
ALLOWED_KEYWORDS = {*IGNORED_KEYWORDS, "position_ids"}
"""Keywords that change no ordinary call, and those that a user allowed; `position_ids` do where the mask says so."""


def allow_keywords(*names: str) -> None:
    """Let keywords pass through attention that do not change it, such as the options of a loss function of your own.

    A model hands the keywords of its forward to its attention and to its loss alike, and attention refuses those that
    it does not know. This holds for all models of the process, and for models in compiled graphs from the next call on.

    Args:
        names: Names of the keywords. Allowing one again changes nothing.

    Raises:
        ValueError: A name is no identifier, or that of a keyword that changes attention.
    """
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in MEANINGFUL_KEYWORDS:
            raise ValueError(
                f"names: got {name!r:.80}, expected keywords that attention may ignore, each a string; give the names "
                "of parameters of your loss function"
            )
    ALLOWED_KEYWORDS.update(names)


def check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Any,
    position_bias: Any,
    scaling: Any,
    sliding_window: int | None,
    kwargs: Mapping[str, Any],
) -> None:
    """Refuses what a call may not ask for; the ValueError names the argument, what it is and what it should be."""
    refuse_unknown(module, kwargs)
    if scaling is not None and not isinstance(scaling, (Real, Tensor, torch.SymFloat, torch.SymInt)):
        raise ValueError(f"scaling: got {scaling!r:.80}, expected a number, or None for head_dim**-0.5")
    mask = attention_mask
    if isinstance(mask, Tensor):
        if mask.device != query.device:
            raise ValueError(
                f"attention_mask: got a tensor on {mask.device} for queries on {query.device}; move it there"
            )
        if mask.layout != torch.strided or mask.dtype.is_complex or mask.ndim < 2:
            raise ValueError(
                f"attention_mask: got shape {tuple(mask.shape)}, {mask.dtype}, {mask.layout}, expected a dense tensor "
                "[batch, 1 or heads, q_len, kv_len] or [batch, kv_len] of booleans or numbers"
            )
        if mask.ndim == 4 and mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
            # could be zeros and ones, or numbers to add
            raise ValueError(
                f"attention_mask: got {mask.dtype} with four dimensions, expected bool (True = attend) or floating "
                "point (added to the scores); say which with attention_mask.bool() or .float()"
            )
    if position_bias is not None:
        is_float = isinstance(position_bias, Tensor) and position_bias.is_floating_point()
        if not is_float or position_bias.dim() < 2 or position_bias.layout != torch.strided:
            got = (
                f"{position_bias.dtype}, {position_bias.layout}, shape {tuple(position_bias.shape)}"
                if isinstance(position_bias, Tensor)
                else f"{position_bias!r:.80}"
            )
            raise ValueError(
                f"position_bias: got {got}, expected a dense floating-point tensor that broadcasts to "
                "[batch, heads, q_len, kv_len]"
            )
    if sliding_window is not None and attention_mask is None and sliding_window < key.shape[2]:
        raise ValueError(
            f"sliding_window: got {sliding_window} for {key.shape[2]} keys and no attention_mask, where stock "
            f"implementations differ, in {type(module).__name__}; pass a mask that holds the window"
        )


def refuse_unknown(module: nn.Module, kwargs: Mapping[str, Any], supported: Collection[str] = KNOWN_KEYWORDS) -> None:
    """Refuses keywords that nobody knows or allowed (ValueError)."""
    for name, value in kwargs.items():
        if value is not None and name not in supported and name not in ALLOWED_KEYWORDS:
            raise ValueError(
                f"{name}: got {type(value).__name__} from {type(module).__name__}, a keyword that adaattn does not "
                "know and that may change what is computed; leave it out of the model's inputs, call "
                f"adaattn_hf.allow_keywords({name!r}) if it is your loss function's, or load the model with "
                "attn_implementation='sdpa'"
            )


def check_paged(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuses keys in a paged cache (ValueError: a keyword of continuous batching has a value)."""
    for name in PAGED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name}: {type(module).__name__} keeps its keys in a paged cache, expected `with "
                "adaattn_hf.continuous_batching(model):` around it; open that block around generate_batch(), or use "
                "generate()"
            )


def check_dense(module: nn.Module, mask: Any, extents: tuple[int, ...]) -> None:
    """Refuses what is no mask of the scores (TypeError for no tensor, ValueError for another shape).

    A wider one, too, for nobody could tell which columns are the keys'.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask: got {type(mask).__name__}, expected a tensor "
            "[batch, 1 or heads, q_len, kv_len] (boolean, True = attend, or added to the scores) or [batch, kv_len]"
        )
    if mask.ndim != 4 or any(size not in (1, extent) for size, extent in zip(mask.shape, extents, strict=True)):
        raise ValueError(
            f"attention_mask: got shape {tuple(mask.shape)}, expected one that broadcasts to {extents} in "
            f"{type(module).__name__}; pass a mask of this call's queries and keys"
        )


def check_square(structure: MaskStructure) -> None:
    """Refuses documents beside a dense mask with a cache, which does not say where queries stand (ValueError)."""
    if structure.q_len != structure.kv_len:
        raise ValueError(
            f"cu_seq_lens_q: got packed documents beside an attention_mask of {structure.q_len} queries, expected as "
            f"many keys, not {structure.kv_len}: it does not say where queries stand; pass one of the two alone"
        )


def with_bias(mask: Tensor, bias: Tensor, query: Tensor, kv_len: int) -> Tensor:
    """Returns an additive mask and a bias, added in the query's precision at least; ValueError for other extents."""
    bias = broadcast_to_scores("position_bias", bias, (*query.shape[:3], kv_len))
    return mask.to(torch.promote_types(mask.dtype, query.dtype)) + bias


def check_untransformed(function: str) -> None:
    """Refuses transforms around a function whose keys lie in a cache that others write to (BackendRefusal)."""
    if (transform := transform_at_work()) is not None:
        raise BackendRefusal(
            f"{function}: called under {transform}, which cannot follow keys in a cache that is written in place; call "
            "it outside of it"
        )


def check_transform(backend: str | None, transform: str, query: Tensor, key: Tensor) -> None:
    """Refuses calls under a function transform that cannot be computed by torch's own operations (BackendRefusal).

    A transform (`torch.func`, `make_fx`) sees torch operations, but nothing of the native kernels, and no symbolic
    lengths.
    """
    if backend is not None:
        raise BackendRefusal(
            f"backend {backend!r} cannot serve this call: {transform} sees nothing of what its kernels compute. Use "
            "attn_implementation='adaattn', which then computes by torch's own operations, or torch.export."
        )
    if any(isinstance(size, torch.SymInt) for size in (*query.shape, *key.shape)):
        raise BackendRefusal(
            f"{transform}: got lengths that are symbols, expected integers, which attention's rules are made of; trace "
            "with tracing_mode='real' or 'fake', or use torch.export with dynamic_shapes"
        )
