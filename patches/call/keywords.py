"""The keywords that reach an attention function: harmless ones, and those that change what is computed."""

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
feature_attention_mask audio_feature_lengths use_audio_in_video length lengths seq_lengths special_tokens_mask
offset_mapping overflow_to_sample_mapping assistant_masks completion_mask prompt_mask tokenizer
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keywords that reach attention but do not change it: inputs and labels of the model, switches of its outputs, columns
of batches, and sizes that only other kernels need. Options of a loss do not either: `losses.takes` knows those. Any
other keyword that is not supported is refused."""

PAGED = ("block_table", "cache", "read_index")
"""Keywords of continuous batching, whose keys and values lie in a paged cache; `batching` serves such calls."""
MEANT = frozenset((
    *PAGED, "cu_seq_lens_q", "cu_seq_lens_k", "indices", "block_indices", "output_attentions", "position_ids"
))  # fmt: skip
"""Keywords that may change what is computed; `position_ids` do so in some model families only."""
KNOWN = HARMLESS | MEANT
