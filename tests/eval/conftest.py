"""Tiny models with tokenizers on disk, and texts of the project's own."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from adaattn_hf.eval import corpora, runner
from adaattn_hf.patches import checkpoint

PAGES = (
    " = The lighthouse = \n \n A lighthouse stood on the rock ; its keeper , an old man , lit the lamp at 6 @.@ 30 "
    "every evening . \n \n = = The keeper = = \n \n He wrote a line a day in a well @-@ worn book ( the log ) and "
    "read it aloud to the gulls . It held 1 @,@ 204 lines when the storm came . \n",
    " = A river = \n \n The river rose in spring and fell in autumn . Boats went down with wood and came up with "
    'salt . " Who pays the ferryman ? " they asked , and nobody knew . \n',
    " = Bread = \n \n Flour , water , salt and time are all that bread needs . The baker 's hands know the rest : "
    "fold , wait , fold , wait , bake . \n \n = = Crust = = \n \n A crust that sings is a crust that is done . \n",
)
PASSAGES = (
    "the keeper lit the lamp every evening and the boats knew the way by the light of the lamp",
    "he asked who pays the ferryman and nobody on the river knew the name of the ferryman",
    "fold and wait and fold and wait and then the baker can bake the bread",
    "a crust that sings is done and the baker smiled at the singing crust",
    "the river rose in spring and fell in autumn and rose again in spring",
    "it held a thousand lines when the storm came and the storm took the book",
)
OWN_PAGES = corpora.wikitext_corpus(PAGES, "own pages")
OWN_PASSAGES = corpora.lastword_corpus(PASSAGES, "own passages")


def _tokenizer(kind: str) -> tf.PreTrainedTokenizerFast:
    """A small tokenizer trained on the texts above: byte-level BPE, or words in lower case for the masked model."""
    texts = [*PAGES, *PASSAGES]
    if kind == "masked":
        core = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        core.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=200, special_tokens=special))
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        return tf.PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            mask_token="[MASK]",
        )  # fmt: skip
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    core.train_from_iterator(texts, trainer)
    return tf.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def _model(kind: str, vocabulary: int) -> tf.PreTrainedModel:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "initializer_range": 0.4}
    if kind == "gpt2":
        return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=48, **sizes))
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "masked":
        return tf.BertForMaskedLM(tf.BertConfig(max_position_embeddings=40, **sizes))
    return tf.LlamaForCausalLM(
        tf.LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, **sizes)
    )


def _saved(kind: str, directory: Path) -> Path:
    tokenizer = _tokenizer(kind)
    _model(kind, len(tokenizer)).eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def one_provenance() -> Iterator[None]:
    """All reports of these tests come from one source and one machine, which are looked at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "provenance", functools.cache(runner.provenance))
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def loaded(llama: Path) -> checkpoint.Checkpoint:
    return checkpoint.load(llama, device="cpu")


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved("gpt2", tmp_path_factory.mktemp("models") / "tiny-gpt2")


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved("masked", tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `pages.txt` in WikiText's form, `passages.jsonl` in LAMBADA's, and `plain.txt`."""
    directory = tmp_path_factory.mktemp("texts")
    (directory / "pages.txt").write_text(" \n" + "".join(PAGES), encoding="utf-8")
    lines = "".join(json.dumps({"text": passage}) + "\n" for passage in PASSAGES)
    (directory / "passages.jsonl").write_text(lines, encoding="utf-8")
    (directory / "plain.txt").write_text("\n".join(PASSAGES), encoding="utf-8")
    return directory
