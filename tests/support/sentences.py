"""A tiny encoder of whole words for sentence-transformers, and sentences for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = [f"word{i}" for i in range(50)]
SENTENCES = [" ".join(WORDS[i % 7 : i % 7 + n]) for i, n in enumerate((1, 30, 3, 12, 2, 5))]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def tokenizer_of_words() -> Any:
    """Whole words by number, with the special tokens of an encoder."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def tiny_encoder(directory: Path) -> Path:
    """Writes a random two-layer BERT with that tokenizer, like a checkpoint."""
    tokenizer_of_words().save_pretrained(directory)
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=len(SPECIAL + WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    tf.BertModel(config).save_pretrained(directory)
    return directory


def embedder(path: Path, implementation: str) -> Any:
    return pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(path), model_kwargs={"attn_implementation": implementation, "dtype": torch.float32}, device="cpu"
    )
