"""What is known about model families that their configurations do not tell, one record per family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
offset_mapping overflow_to_sample_mapping assistant_masks completion_mask prompt_mask
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keywords that reach attention but do not change it: inputs and labels of the model, switches of its outputs, columns
of batches, and sizes that only other kernels need. Options of a loss do not either: `losses.takes` knows those. Any
other keyword that is not supported is refused."""

PAGED = ("block_table", "cache")
"""Keywords of continuous batching, whose keys and values lie in a paged cache that only `paged|NAME` can read."""
MEANT = frozenset((
    *PAGED, "cu_seq_lens_q", "cu_seq_lens_k", "indices", "block_indices", "output_attentions", "position_ids"
))  # fmt: skip
"""Keywords that may change what is computed; `position_ids` do so in some model families only."""
KNOWN = HARMLESS | MEANT


@dataclass(frozen=True)
class Family:
    """Facts of one `config.model_type`.

    Attributes:
        model_type: As in the configuration.
        encoder_only: The family keeps no keys and values from call to call, unless it is configured as a decoder.
        dense_mask: The model slices or combines the prepared mask and needs a tensor.
        loses_borders: The model makes its masks without positions, or does not pass `cu_seq_lens_*` to attention;
            what its caller told of documents is looked up, and they begin where positions fall back.
        computes_with_cache: The model computes with what its cache hands to it before attention does, which codes are
            not for.
        unrouted: How a part of the model bypasses Transformers' attention interface, where its source does not show
            it; empty if none does.
    """

    model_type: str
    encoder_only: bool = False
    dense_mask: bool = False
    loses_borders: bool = False
    computes_with_cache: bool = False
    unrouted: str = ""


_ENCODERS = """
albert bert camembert convbert data2vec-text distilbert electra ernie esm eurobert flaubert ibert
jina_embeddings_v3 mobilebert modernbert mpnet nomic_bert roberta roberta-prelayernorm roc_bert roformer
splinter xlm-roberta xlm-roberta-xl xmod
"""
_DENSE = """
axk2 deepseek_v32 deepseek_v4 dots3_note glm_moe_dsa granite_speech5 hy_v4 mistral_large4
nemotron_asr_streaming parakeet pix2struct qwen4_exp sam3 sam3_lite_text swin beit gpt_bigcode granite4_vision
siglip2 gemma4 gemma4_unified diffusion_gemma
"""
_BORDERLESS = """
afmoe biogpt gpt_oss nemotron opt stablelm
"""

FAMILIES: dict[str, Family] = {
    **{name: Family(name, encoder_only=True) for name in _ENCODERS.split()},
    **{name: Family(name, dense_mask=True) for name in _DENSE.split()},
    **{name: Family(name, loses_borders=True) for name in _BORDERLESS.split()},
    **{name: Family(name, computes_with_cache=True) for name in ("cpmant", "diffllama", "doge", "jetmoe")},
    "bigbird_pegasus": Family(
        "bigbird_pegasus", unrouted="adds the mask to scores of its own in the encoder"
    ),
}


def family_of(config: Any) -> Family | None:
    """Returns the record of a configuration's family, None if there is none."""
    # called in every forward pass: class attributes are ten times as fast as `PretrainedConfig.__getattribute__`
    model_type = getattr(type(config), "model_type", "") or getattr(config, "model_type", "")
    return FAMILIES.get(model_type.removesuffix("_text"))


def needs_dense_mask(config: Any) -> bool:
    """Whether the family's code computes with the prepared mask."""
    family = family_of(config)
    return family is not None and family.dense_mask


def loses_borders(config: Any) -> bool:
    """Whether the family's masks or attention are not told where packed documents begin."""
    family = family_of(config)
    return family is not None and family.loses_borders
