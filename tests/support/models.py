"""Tiny models with random weights, twice: once with stock eager attention, once with ours.

Default initialisation gives near-uniform attention, under which a wrong mask hardly shows; the weights here are drawn
wide enough that every key counts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers as tf
from torch import Tensor, nn

import adaattn_hf  # noqa: F401  (registers the names)

VOCABULARY = 64
HIDDEN = 32
BATCH, LENGTH = 3, 11
RTOL = 1e-5
"""DESIGN: fp32 attention is exact to 1e-5."""

_LLAMA: Mapping[str, Any] = MappingProxyType(
    dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
)
_GROUPED: Mapping[str, Any] = MappingProxyType({**_LLAMA, "num_key_value_heads": 2})
_SIZED: Mapping[str, Any] = MappingProxyType({**_GROUPED, "head_dim": 8})
_GPT2: Mapping[str, Any] = MappingProxyType(
    dict(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        n_positions=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
)
_BERT: Mapping[str, Any] = MappingProxyType(
    {**_LLAMA, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
)

# keywords of the base class, which the signatures of these two do not name
_LOCAL: Mapping[str, Any] = MappingProxyType(
    {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
)
_STARTS_WITH_PADDING: Mapping[str, Any] = MappingProxyType({"decoder_start_token_id": 0})

Recipe = Callable[[], tuple[type[tf.PreTrainedModel], tf.PreTrainedConfig]]

GPT2_HEADS = (
    tf.GPT2Model,
    tf.GPT2LMHeadModel,
    tf.GPT2DoubleHeadsModel,
    tf.GPT2ForSequenceClassification,
    tf.GPT2ForTokenClassification,
    tf.GPT2ForQuestionAnswering,
)
BERT_HEADS = (
    tf.BertModel,
    tf.BertForPreTraining,
    tf.BertLMHeadModel,
    tf.BertForMaskedLM,
    tf.BertForNextSentencePrediction,
    tf.BertForSequenceClassification,
    tf.BertForMultipleChoice,
    tf.BertForTokenClassification,
    tf.BertForQuestionAnswering,
)
LLAMA_HEADS = (
    tf.LlamaModel,
    tf.LlamaForCausalLM,
    tf.LlamaForSequenceClassification,
    tf.LlamaForQuestionAnswering,
    tf.LlamaForTokenClassification,
)

DECODERS: dict[str, Recipe] = {
    "gpt2": lambda: (tf.GPT2LMHeadModel, tf.GPT2Config(**_GPT2)),
    "gpt2-inverse-layer": lambda: (
        tf.GPT2LMHeadModel,
        tf.GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    ),
    "llama": lambda: (tf.LlamaForCausalLM, tf.LlamaConfig(**_GROUPED)),
    "llama-mqa": lambda: (tf.LlamaForCausalLM, tf.LlamaConfig(**{**_LLAMA, "num_key_value_heads": 1})),
    "bert-decoder": lambda: (tf.BertLMHeadModel, tf.BertConfig(**_BERT, is_decoder=True)),
    "mistral-window": lambda: (tf.MistralForCausalLM, tf.MistralConfig(**_GROUPED, sliding_window=4)),
    "qwen2-hybrid": lambda: (
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    "gemma2-softcap": lambda: (
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config(**_SIZED, sliding_window=4, attn_logit_softcapping=5.0),
    ),
    "gemma3-hybrid": lambda: (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig(**_SIZED, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    ),
    "gpt-oss-sinks": lambda: (
        tf.GptOssForCausalLM,
        tf.GptOssConfig(**_SIZED, sliding_window=4, num_local_experts=2, num_experts_per_tok=2),
    ),
    "llama4-chunked": lambda: (
        tf.Llama4ForCausalLM,
        tf.Llama4TextConfig(
            **_SIZED,
            attention_chunk_size=4,
            layer_types=["chunked_attention", "full_attention"],
            num_local_experts=2,
            intermediate_size_mlp=48,
        ),
    ),
    "deepseek-mla": lambda: (
        tf.DeepseekV3ForCausalLM,
        tf.DeepseekV3Config(
            **{**_LLAMA, "num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            first_k_dense_replace=2,
        ),
    ),
    "phi": lambda: (tf.PhiForCausalLM, tf.PhiConfig(**_LLAMA)),
    "gpt-neox": lambda: (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**_LLAMA)),
}
ENCODERS: dict[str, Recipe] = {
    "bert": lambda: (tf.BertModel, tf.BertConfig(**_BERT)),
    "roberta": lambda: (tf.RobertaModel, tf.RobertaConfig(**_BERT)),
    "modernbert-local": lambda: (
        tf.ModernBertModel,
        tf.ModernBertConfig(**_LLAMA, **_LOCAL),
    ),
}
ENCODER_DECODERS: dict[str, Recipe] = {
    "t5": lambda: (
        tf.T5ForConditionalGeneration,
        tf.T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            pad_token_id=0,
            eos_token_id=None,
            dropout_rate=0.0,
            **_STARTS_WITH_PADDING,
        ),
    ),
    "bart": lambda: (
        tf.BartForConditionalGeneration,
        tf.BartConfig(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=96,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=1,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
            dropout=0.0,
        ),
    ),
}
RECIPES = MappingProxyType({**DECODERS, **ENCODERS, **ENCODER_DECODERS})


class Pair(NamedTuple):
    """One set of weights under stock eager attention and under ours."""

    stock: Any
    ours: Any


def config_of(family: str) -> tf.PreTrainedConfig:
    """The configuration of `gpt2`, `bert` or `llama` for a head of any task."""
    return RECIPES[family]()[1]


def build(
    cls: type[tf.PreTrainedModel], config: tf.PreTrainedConfig, implementation: str = "adaattn"
) -> Pair:
    """Two fresh models with equal, wide weights, in evaluation mode."""
    torch.manual_seed(1)
    stock = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = cls._from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if parameter.dim() > 1 and not any(part in name for part in ("embed", "router", "gate.weight")):
                parameter.normal_(0, 0.15, generator=generator)
    ours.load_state_dict(stock.state_dict())
    return Pair(stock, ours)


@cache
def pair(name: str, implementation: str = "adaattn") -> Pair:
    """The models of a recipe, shared by all tests of a process: evaluation only, not to be changed."""
    cls, config = RECIPES[name]()
    return build(cls, config, implementation)


def fresh_pair(name: str, implementation: str = "adaattn", **config_changes: Any) -> Pair:
    """The models of a recipe for a test that trains or changes them."""
    cls, config = RECIPES[name]()
    for key, value in config_changes.items():
        setattr(config, key, value)
    return build(cls, config, implementation)


def switch_off_dropout(model: nn.Module) -> None:
    """Take the randomness out of training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random token numbers `[batch, length]` without special tokens."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, batch: int = BATCH, length: int = LENGTH) -> Tensor | None:
    """A 2-D attention mask: `none`, `ones`, `left`, `right` or `holes`."""
    if side == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "left":
        mask[0, :4], mask[1, :1] = 0, 0
    elif side == "right":
        mask[0, -4:], mask[1, -1:] = 0, 0
    elif side == "holes":
        mask[0, 2:4], mask[1, 7] = 0, 0
    elif side != "ones":
        raise ValueError(f"side: got {side!r}, expected none, ones, left, right or holes")
    return mask


def main_output(output: Any) -> Tensor:
    """What a model is run for: logits, or the last hidden state."""
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            found: Tensor = getattr(output, name)
            return found
    raise TypeError(f"output: got {type(output).__name__}, expected one with logits or a last hidden state")


def assert_same(expected: Tensor, actual: Tensor, valid: Tensor | None = None, rtol: float = RTOL) -> None:
    """Equal to `rtol` of the largest expected value where tokens are real, and finite everywhere."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all(), "rows of padding must be finite"
    difference = (actual.double() - expected.double()).abs()
    if valid is not None:
        assert valid.any()
        difference = difference[valid.bool()]
    bound = rtol * max(1.0, float(expected.abs().max()))
    assert float(difference.max()) <= bound, f"largest difference {float(difference.max()):.2e} > {bound:.2e}"
