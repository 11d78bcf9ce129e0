"""The three demo architectures, each of 1.1 million parameters with heads of 32, and their recipes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)


@dataclass(frozen=True)
class Recipe:
    """How one demo model is trained.

    Attributes:
        objective: `causal` (next token) or `masked` (BERT's masked tokens).
        context: Tokens per training window and the longest input of the model.
        batch_size: Windows per step.
        steps: Optimizer steps.
        learning_rate: Peak of AdamW's rate, reached after `warmup` steps, then a cosine down to 2 % of it.
        dropout: Of attention probabilities, and of residuals and embeddings where the family has it.
        initializer_range: Standard deviation of fresh weights; 0.02 suits wider models, and leaves attention
            of this width uniform for very long.
        short_steps: Steps at the beginning on windows of `short_context` tokens, with as many tokens per step
            as later (BERT did the same: Devlin et al. 2019, appendix A.2).
        short_context: Tokens per window in these steps.
        evaluate_every: Steps between looks at the validation split.
        seed: Of the weights, the windows, the dropout and the masks.
    """

    objective: str
    context: int
    batch_size: int
    steps: int
    learning_rate: float
    dropout: float
    warmup: int = 400
    weight_decay: float = 0.1
    initializer_range: float = 0.05
    short_steps: int = 0
    short_context: int = 128
    evaluate_every: int = 500
    seed: int = 20240229


RECIPES: dict[str, Recipe] = {
    "gpt2": Recipe("causal", 512, 32, 12_000, 5e-3, 0.1),
    "llama": Recipe("causal", 1024, 16, 11_000, 4e-3, 0.1),
    "bert": Recipe("masked", 512, 32, 14_000, 2e-3, 0.0, short_steps=10_000),
}


def sinusoids(positions: int, width: int, scale: float) -> Tensor:
    """Sinusoidal positions `[positions, width]` with the given root mean square.

    Learned positions that begin like this let a head find its neighbours soon; from random ones each position
    has to learn its neighbours for itself, and a masked language model stays at word frequencies for very long.
    Source: Vaswani et al. 2017, section 3.5.
    """
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1) * (scale * math.sqrt(2.0))


def _start_positions(table: torch.nn.Embedding, recipe: Recipe) -> None:
    with torch.no_grad():
        table.weight.copy_(sinusoids(table.num_embeddings, table.embedding_dim, recipe.initializer_range))


def build(name: str, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> PreTrainedModel:
    """A demo model with fresh weights, in fp32.

    Args:
        name: `gpt2`, `llama` or `bert`.
        tokenizer: Gives the vocabulary's size and the special tokens.
        recipe: Gives the context and the dropout.

    Raises:
        ValueError: The name is not one of the three.
    """
    if name == "gpt2":
        gpt2 = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_positions=recipe.context,
                n_embd=160,
                n_layer=4,
                n_head=5,
                n_inner=288,
                initializer_range=recipe.initializer_range,
                resid_pdrop=recipe.dropout,
                embd_pdrop=recipe.dropout,
                attn_pdrop=recipe.dropout,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
        _start_positions(gpt2.transformer.wpe, recipe)
        return gpt2
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                max_position_embeddings=recipe.context,
                hidden_size=160,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=32,
                intermediate_size=224,
                initializer_range=recipe.initializer_range,
                attention_dropout=recipe.dropout,
                tie_word_embeddings=True,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    if name == "bert":
        bert = BertForMaskedLM(
            BertConfig(
                vocab_size=len(tokenizer),
                max_position_embeddings=recipe.context,
                hidden_size=160,
                num_hidden_layers=4,
                num_attention_heads=5,
                intermediate_size=288,
                initializer_range=recipe.initializer_range,
                hidden_dropout_prob=recipe.dropout,
                attention_probs_dropout_prob=recipe.dropout,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        _start_positions(bert.bert.embeddings.position_embeddings, recipe)
        return bert
    raise ValueError(f"model is {name!r}, expected one of {', '.join(RECIPES)}")
