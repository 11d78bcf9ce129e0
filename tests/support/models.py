"""Tiny models, twice: with stock eager attention, and with ours; their random weights make every key count."""

import copy
from collections.abc import Mapping
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

USUAL: Mapping[str, Any] = MappingProxyType(
    dict(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=96, type_vocab_size=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, cls_token_id=1, sep_token_id=2,
        decoder_start_token_id=0, forced_eos_token_id=None, embedding_size=HIDDEN, d_model=HIDDEN, d_kv=8,
        d_ff=48, num_layers=2, num_heads=4, dim=HIDDEN, n_layers=2, n_heads=4, hidden_dim=48, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, image_size=16, patch_size=4, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        dropout_rate=0.0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )
)  # fmt: skip
"""Sizes and switches that a configuration takes where it knows the name."""
MLA: Mapping[str, Any] = MappingProxyType(
    dict(
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, head_dim=8,
        v_head_dim=12, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=2,
    )
)  # fmt: skip
"""What configurations with latent keys take besides."""
HYBRID: Mapping[str, Any] = MappingProxyType(
    {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
)

Recipe = tuple[type[tf.PreTrainedModel], Mapping[str, Any]]
"""A class, and what its tiny configuration has besides the usual sizes."""

GPT2_HEADS = (
    tf.GPT2Model, tf.GPT2LMHeadModel, tf.GPT2DoubleHeadsModel, tf.GPT2ForSequenceClassification,
    tf.GPT2ForTokenClassification, tf.GPT2ForQuestionAnswering,
)  # fmt: skip
BERT_HEADS = (
    tf.BertModel, tf.BertForPreTraining, tf.BertLMHeadModel, tf.BertForMaskedLM, tf.BertForNextSentencePrediction,
    tf.BertForSequenceClassification, tf.BertForMultipleChoice, tf.BertForTokenClassification,
    tf.BertForQuestionAnswering,
)  # fmt: skip
LLAMA_HEADS = (
    tf.LlamaModel, tf.LlamaForCausalLM, tf.LlamaForSequenceClassification, tf.LlamaForQuestionAnswering,
    tf.LlamaForTokenClassification,
)  # fmt: skip

DECODERS: dict[str, Recipe] = {
    "gpt2": (tf.GPT2LMHeadModel, {}),
    "gpt2-inverse-layer": (
        tf.GPT2LMHeadModel, {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
    ),
    "llama": (tf.LlamaForCausalLM, {}),
    "llama-mqa": (tf.LlamaForCausalLM, {"num_key_value_heads": 1}),
    "bert-decoder": (tf.BertLMHeadModel, {"is_decoder": True}),
    "mistral-window": (tf.MistralForCausalLM, {"sliding_window": 4}),
    "qwen2-hybrid": (
        tf.Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "gemma2-softcap": (tf.Gemma2ForCausalLM, {"sliding_window": 4, "attn_logit_softcapping": 5.0}),
    "gemma3-hybrid": (tf.Gemma3ForCausalLM, HYBRID),
    "gpt-oss-sinks": (tf.GptOssForCausalLM, {"sliding_window": 4, "num_local_experts": 2}),
    "llama4-chunked": (
        tf.Llama4ForCausalLM,
        {
            "attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"], "num_local_experts": 2,
            "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
        },
    ),
    "deepseek-mla": (tf.DeepseekV3ForCausalLM, {}),
    "phi": (tf.PhiForCausalLM, {"num_key_value_heads": 4}),
    "gpt-neox": (tf.GPTNeoXForCausalLM, {}),
}  # fmt: skip
ENCODERS: dict[str, Recipe] = {
    "bert": (tf.BertModel, {}), "roberta": (tf.RobertaModel, {}),
    "modernbert-local": (tf.ModernBertModel, {"local_attention": 4, "global_attn_every_n_layers": 2}),
}  # fmt: skip
ENCODER_DECODERS: dict[str, Recipe] = {
    "t5": (tf.T5ForConditionalGeneration, {"decoder_start_token_id": 0}),
    "bart": (tf.BartForConditionalGeneration, {"encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 1}),
}
RECIPES = MappingProxyType({**DECODERS, **ENCODERS, **ENCODER_DECODERS})


def sized(config_class: Any, changes: Mapping[str, Any] = MappingProxyType({})) -> tf.PreTrainedConfig:
    """A tiny configuration of a class: the usual sizes that it and its parts know, and changes."""
    known = config_class()
    known.allow_global_per_layer_attribute_access = True  # else one whose layers differ hides what it has
    usual = {name: value for name, value in USUAL.items() if hasattr(known, name)}
    if hasattr(known, "kv_lora_rank"):
        usual |= MLA
    for name, value in list(usual.items()):
        default = getattr(known, name, None)
        if getattr(getattr(config_class, name, None), "fset", name) is None:
            del usual[name]  # a property
        elif isinstance(default, (list, tuple)) and isinstance(value, int):
            layers = changes.get("num_hidden_layers", len(default))
            usual[name] = [value] * (layers if len(default) == known.num_hidden_layers else len(default))
    asked = copy.deepcopy(dict(changes))
    for name in config_class.sub_configs:
        if isinstance(part := getattr(known, name, None), tf.PreTrainedConfig):
            usual[name] = sized(type(part), asked.pop(name, {})).to_dict()
    config: tf.PreTrainedConfig = config_class(**{**usual, **asked})
    return config


class Pair(NamedTuple):
    """One set of weights under stock eager attention and under ours."""

    stock: Any
    ours: Any


def config_of(name: str) -> tf.PreTrainedConfig:
    cls, changes = RECIPES[name]
    return sized(cls.config_class, changes)


def build(cls: type[tf.PreTrainedModel], config: tf.PreTrainedConfig, implementation: str = "adaattn") -> Pair:
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
    return fresh_pair(name, implementation)


@cache
def shallow(name: str, implementation: str = "adaattn") -> Pair:
    """The same with one layer, of which a graph is traced in half the time."""
    return fresh_pair(name, implementation, num_hidden_layers=1)


def fresh_pair(name: str, implementation: str = "adaattn", **config_changes: Any) -> Pair:
    """The models of a recipe for a test that trains or changes them."""
    config = config_of(name)
    for key, value in config_changes.items():
        setattr(config, key, value)
    return build(RECIPES[name][0], config, implementation)


def switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def checkpointed(model: Any, reentrant: bool) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def cacheless(name: str) -> dict[str, Any]:
    return {} if name in ENCODERS else {"use_cache": False}


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, batch: int = BATCH, length: int = LENGTH) -> Any:
    """A mask `[batch, length]` whose first two rows have padding there; None for the side `none`."""
    if side == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.long)
    hidden = {"left": (slice(4), slice(1)), "right": (slice(-4, None), slice(-1, None)), "holes": (slice(2, 4), 7)}
    for row, columns in enumerate(hidden[side] if side != "ones" else ()):
        mask[row, columns] = 0
    return mask


@torch.no_grad()
def answers(*models: Any, **inputs: Any) -> list[Tensor]:
    """The main output of each model for the same inputs."""
    return [main_output(model(**inputs)) for model in models]


def logits(model: Any, length: int = LENGTH) -> Tensor:
    return answers(model, input_ids=tokens(length=length))[0]


def main_output(output: Any) -> Tensor:
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            found: Tensor = getattr(output, name)
            return found
    raise TypeError(f"output: got {type(output).__name__}, expected one with logits or a last hidden state")


class InBuffers(nn.Module):
    """A linear layer whose weights are buffers, as those of quantised layers."""

    packed: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("packed", linear.weight.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.packed.t()


class OfTensors(nn.Module):
    """A recipe's model as a function of token ids and their mask, as tracers want it."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.model, self.options = model, cacheless(name)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return main_output(self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options))


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
