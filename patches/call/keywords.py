"""The keywords that reach an attention function: harmless ones, options of a loss, and those that change the result.

A model hands the keywords of its forward to its layers and to its loss alike. Options of Transformers' losses are in
the list of harmless ones; the keywords of other losses are added by whoever brings the loss.
"""

from __future__ import annotations

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
        ValueError: A name is none, or that of a keyword that changes attention.
    """
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name in MEANINGFUL_KEYWORDS:
            raise ValueError(
                f"names: got {name!r:.80}, expected keywords that attention may ignore, each a string; give the names "
                "of parameters of your loss function"
            )
    ALLOWED_KEYWORDS.update(names)
