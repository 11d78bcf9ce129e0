"""The script that trains the demo models: reproducible, resumable, refuses what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from studies.demo.architectures import RECIPES, Recipe, build
from studies.demo.corpus import Archive, Document, Split, obtain
from studies.demo.loop import learning_rate, mask_tokens, training_batch
from studies.demo.samples import excerpt, last_word_sample, write_samples
from studies.demo.train import train_one, with_settings
from studies.demo.vocabulary import TOKENIZERS

CPU = torch.device("cpu")


def tiny(name: str) -> Recipe:
    return replace(
        RECIPES[name],
        context=32,
        batch_size=2,
        steps=6,
        warmup=2,
        evaluate_every=3,
        short_steps=2,
        short_context=16,
    )


def tiny_documents() -> list[Document]:
    sentence = "The whale sank the ship {0}, and captain {0} saw that the whale was white. "
    texts: dict[Split, str] = {
        "train": "".join(sentence.format(number) for number in range(40)),
        "validation": "".join(sentence.format(number) for number in range(40, 48)),
        "heldout": "".join(sentence.format(number) for number in range(48, 60)),
    }
    return [Document(f"story/{split}", f"Story {split}", text, split) for split, text in texts.items()]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_interrupted_run_ends_where_an_uninterrupted_one_does(name: str, tmp_path: Path) -> None:
    documents, recipe = tiny_documents(), tiny(name)
    straight = train_one(name, documents, recipe, tmp_path / "straight", CPU, None)
    part = train_one(name, documents, recipe, tmp_path / "resumed", CPU, 3)
    assert part.step == 3
    whole = train_one(name, documents, recipe, tmp_path / "resumed", CPU, None)
    assert whole.step == straight.step == recipe.steps
    assert whole.history == straight.history
    first = load_file(tmp_path / "straight" / f"model-{name}" / "model.safetensors")
    second = load_file(tmp_path / "resumed" / f"model-{name}" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {value.dtype for value in first.values()} == {torch.float16}

    directory = tmp_path / "straight" / f"model-{name}"
    loader = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model = loader.from_pretrained(directory)
    assert model.dtype == torch.float32
    record = json.loads((directory / "training.json").read_text())
    assert record["history"] == straight.history
    assert record["figures"]["nll"]["heldout"] > 0
    card = (directory / "README.md").read_text()
    assert f"{record['figures']['nll']['heldout']:.3f}" in card
    assert AutoConfig.from_pretrained(directory).model_type == name
    assert len(AutoTokenizer.from_pretrained(directory)) == model.config.vocab_size


def test_state_of_another_recipe_is_refused(tmp_path: Path) -> None:
    documents, recipe = tiny_documents(), tiny("gpt2")
    train_one("gpt2", documents, recipe, tmp_path, CPU, 3)
    with pytest.raises(ValueError, match="another recipe"):
        train_one("gpt2", documents, replace(recipe, learning_rate=1.0), tmp_path, CPU, None)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the training split has"):
        train_one("gpt2", tiny_documents(), replace(tiny("gpt2"), context=4096), tmp_path, CPU, None)


def test_unknown_model_is_refused() -> None:
    tokenizer = TOKENIZERS["gpt2"](["some text"])
    with pytest.raises(ValueError, match="expected one of gpt2, llama, bert"):
        build("t5", tokenizer, tiny("gpt2"))


def test_masking_chooses_about_15_percent_and_no_special_token() -> None:
    tokenizer = TOKENIZERS["bert"]([document.page for document in tiny_documents()])
    ids = torch.randint(5, len(tokenizer), (64, 256), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    batch = mask_tokens(ids, tokenizer, torch.Generator().manual_seed(1))
    chosen = batch["labels"] != -100
    assert 0.13 < chosen.float().mean() < 0.17
    assert not chosen[:, 0].any()
    assert not chosen[:, -1].any()
    assert torch.equal(batch["labels"][chosen], ids[chosen])
    assert torch.equal(batch["input_ids"][~chosen], ids[~chosen])
    masked = (batch["input_ids"][chosen] == tokenizer.mask_token_id).float().mean()
    assert 0.75 < masked < 0.85


def test_learning_rate_rises_then_falls_to_two_percent() -> None:
    recipe = replace(RECIPES["gpt2"], steps=100, warmup=10, learning_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == 1.0
    assert rates[100] == pytest.approx(0.02)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_tokenizer_training_is_reproducible() -> None:
    pages = [document.page for document in tiny_documents()]
    for make in TOKENIZERS.values():
        assert make(pages).backend_tokenizer.to_str() == make(pages).backend_tokenizer.to_str()


def test_archive_with_other_bytes_is_refused(tmp_path: Path) -> None:
    archive = Archive("name", "1.0", "0" * 128)
    (tmp_path / archive.filename).write_bytes(b"other")
    with pytest.raises(ValueError, match="sha512"):
        obtain(archive, tmp_path)


def test_excerpt_ends_with_a_sentence() -> None:
    document = Document("a", "A", "One two. Three four! Five six. Seven", "train")
    assert excerpt(document, 31) == "= A =\n\nOne two. Three four!"
    assert excerpt(document, 1000) == document.page
    with pytest.raises(ValueError, match="no sentence ends"):
        excerpt(document, 10)


def test_last_words_stand_in_the_context_and_not_in_their_sentence(tmp_path: Path) -> None:
    filler = "Nothing that matters here was said by anybody on that long and quiet day at sea. " * 4
    text = (
        f"The old captain of the ship had always feared the white whale. {filler}So he met the white whale."
    )
    document = Document("b", "B", text, "heldout")
    (item,) = last_word_sample([document])
    assert item["text"].endswith("he met the white whale")
    apart = Document(
        "c", "C", text.replace("feared the white whale", "feared the dark and the cold"), "heldout"
    )
    assert last_word_sample([apart]) == []
    write_samples([document, *tiny_documents()], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "heldout.jsonl",
        "calibration.jsonl",
        "lastword.jsonl",
        "splits.json",
        "README.md",
    }


def test_first_steps_use_short_windows_with_as_many_tokens() -> None:
    tokenizer = TOKENIZERS["bert"]([document.page for document in tiny_documents()])
    recipe = replace(tiny("bert"), short_steps=2, short_context=16)
    stream = torch.arange(100) % len(tokenizer)
    short, full = (training_batch(stream, recipe, tokenizer, step)["input_ids"] for step in (1, 2))
    assert short.shape == (4, 16)
    assert full.shape == (2, 32)


def test_settings_change_the_recipe_and_refuse_what_it_does_not_have() -> None:
    recipe = RECIPES["gpt2"]
    assert with_settings(recipe, ["steps=7", "dropout=0.5"]) == replace(recipe, steps=7, dropout=0.5)
    with pytest.raises(typer.BadParameter, match="learning_rate"):
        with_settings(recipe, ["rate=1"])
    with pytest.raises(typer.BadParameter, match="expected int"):
        with_settings(recipe, ["steps=many"])
