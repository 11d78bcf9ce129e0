"""Tokenizers of the demo models: byte-level BPE for GPT-2 and LLaMA, lower-case WordPiece for BERT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1536
PUNCTUATION = "\u2013\u2014\u2018\u2019\u201c\u201d\u2022\u00b0"
"""Dashes, quotation marks, bullet and degree sign: the text's signs outside ASCII."""


def _byte_level_bpe(
    texts: Sequence[str], special: list[str], pre_tokenizer: pre_tokenizers.PreTokenizer
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _wrapped(**settings: Any) -> PreTrainedTokenizerFast:
    make: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    tokenizer: PreTrainedTokenizerFast = make(**settings)
    return tokenizer


def gpt2_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """GPT-2's kind: byte-level BPE, one special token that separates documents."""
    end = "<|endoftext|>"
    tokenizer = _byte_level_bpe(texts, [end], pre_tokenizers.ByteLevel(add_prefix_space=False))
    return _wrapped(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end, model_max_length=512
    )


def llama_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """LLaMA's kind: byte-level BPE that takes digits one by one and puts a first token before every text."""
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    tokenizer = _byte_level_bpe(
        texts,
        [begin, end],
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin}:1 $B:1",
        special_tokens=[(begin, tokenizer.token_to_id(begin))],
    )
    return _wrapped(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=end, model_max_length=1024
    )


def _lower_case_wordpiece(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(special)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def bert_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """BERT's kind: lower-case WordPiece with `[CLS]` and `[SEP]` around every text."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = _lower_case_wordpiece(special)
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)] + list(PUNCTUATION)
    # The trainer numbers continuing letters in the order of a randomly seeded hash table, and breaks ties by
    # number: naming them beforehand makes the vocabulary the same in every run.
    beforehand = special + [f"##{letter}" for letter in alphabet]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY,
        special_tokens=beforehand,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained = _lower_case_wordpiece(special)
    trained.train_from_iterator(texts, trainer)
    tokenizer.model = models.WordPiece(trained.get_vocab(), unk_token="[UNK]")  # noqa: S106
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return _wrapped(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",  # noqa: S106
        pad_token="[PAD]",  # noqa: S106
        cls_token="[CLS]",  # noqa: S106
        sep_token="[SEP]",  # noqa: S106
        mask_token="[MASK]",  # noqa: S106
        model_max_length=512,
    )


TOKENIZERS: dict[str, Callable[[Sequence[str]], PreTrainedTokenizerFast]] = {
    "gpt2": gpt2_tokenizer,
    "llama": llama_tokenizer,
    "bert": bert_tokenizer,
}
