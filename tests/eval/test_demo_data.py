"""The demo models and the text that travel with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from adaattn_hf.eval import demo

NAMES = tuple(demo.DEMO_MODELS)
DATA = Path(demo.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def no_network() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket.connect", _refuse)
        yield


def _refuse(*arguments: object) -> None:
    raise AssertionError("the demo reached for the network")


def load(name: str, **options: Any) -> Any:
    loader = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    return loader.from_pretrained(demo.demo_model_path(name), **options).eval()


def record(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((demo.demo_model_path(name) / "training.json").read_text())
    return loaded


def windows(name: str, count: int) -> tuple[torch.Tensor, Any]:
    """Ids `[count, context]` from the beginning of every third held-out page, with the first and last ids of BERT."""
    tokenizer = AutoTokenizer.from_pretrained(demo.demo_model_path(name))
    context = record(name)["recipe"]["context"]
    span = context - 2 if name == "bert" else context
    pages = tokenizer(demo.heldout_pages()[1::3], add_special_tokens=False, verbose=False)["input_ids"]
    tokens = [token for page in pages for token in page[:context]]
    ids = torch.tensor(tokens[: count * span]).view(count, span)
    if name == "bert":
        first, last = (
            torch.full((count, 1), one) for one in (tokenizer.cls_token_id, tokenizer.sep_token_id)
        )
        ids = torch.cat([first, ids, last], dim=1)
    return ids, tokenizer


@torch.no_grad()
def nll(name: str, nearest: int | None) -> float:
    """Mean nll in nats where a query sees so many nearest keys: of next tokens, or of every seventh one, masked."""
    ids, tokenizer = windows(name, 4)
    asked, labels = ids, ids
    if name == "bert":
        at = torch.arange(ids.shape[1]) % 7 == 3
        asked, labels = torch.where(at, tokenizer.mask_token_id, ids), torch.where(at, ids, -100)
    mask = None
    if nearest is not None:
        place = torch.arange(ids.shape[1])
        distance = place[:, None] - place
        mask = (distance < nearest) & (distance > (-nearest if name == "bert" else -1))
        mask = mask[None, None].expand(len(ids), -1, -1, -1)
    return float(load(name)(input_ids=asked, labels=labels, attention_mask=mask).loss)


def test_everything_together_is_at_most_8_mb() -> None:
    files = [
        path for folder in DATA.iterdir() if folder.is_dir() for path in folder.rglob("*") if path.is_file()
    ]
    kept = [path for path in files if "__pycache__" not in path.parts]
    assert {path.parent.name for path in kept} == {*demo.DEMO_MODELS.values(), "text-sample"}
    assert sum(path.stat().st_size for path in kept) <= 8_000_000


@pytest.mark.parametrize("name", NAMES)
def test_model_loads_in_fp32_and_is_what_its_record_says(name: str) -> None:
    model, facts = load(name), record(name)
    assert model.dtype == torch.float32
    assert model.config.model_type == name
    assert model.config.max_position_embeddings >= 512
    assert model.num_parameters() == facts["parameters"]
    assert model.config.num_attention_heads >= 4
    assert (
        f"{facts['figures']['nll']['heldout']:.3f}" in (demo.demo_model_path(name) / "README.md").read_text()
    )


def test_llama_has_grouped_heads() -> None:
    config = load("llama").config
    assert config.num_attention_heads // config.num_key_value_heads > 1
    assert config.num_key_value_heads > 1


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_byte_level_tokenizers_give_back_every_text(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.demo_model_path(name))
    for text in [*demo.heldout_pages()[:4], "naïve façade — 42 км ☃\n\ttab"]:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_wordpiece_gives_back_the_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.demo_model_path("bert"))
    for text in demo.heldout_pages():
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        assert re.sub(r"\s", "", decoded) == re.sub(r"\s", "", text.lower())


def test_first_and_last_tokens_are_those_of_the_family() -> None:
    llama, bert, gpt2 = (
        AutoTokenizer.from_pretrained(demo.demo_model_path(n)) for n in ("llama", "bert", "gpt2")
    )
    assert llama("whale")["input_ids"][0] == llama.bos_token_id
    assert gpt2("whale")["input_ids"][0] != gpt2.bos_token_id
    ids = bert("whale")["input_ids"]
    assert (ids[0], ids[-1]) == (bert.cls_token_id, bert.sep_token_id)


def test_held_out_documents_were_not_trained_on() -> None:
    splits = json.loads((DATA / "text-sample" / "splits.json").read_text(encoding="utf-8"))
    bodies = {split: set(documents.values()) for split, documents in splits.items()}
    assert not bodies["heldout"] & (bodies["train"] | bodies["validation"])
    assert not bodies["validation"] & bodies["train"]
    for file, split in (("heldout.jsonl", "heldout"), ("calibration.jsonl", "validation")):
        for line in (DATA / "text-sample" / file).read_text().splitlines():
            page = json.loads(line)
            assert splits[split][page["document"]] == page["sha256"]
    for item in demo.lastword_items():
        assert item["document"] in splits["heldout"]


def test_last_words_can_be_found_in_their_context() -> None:
    items = demo.lastword_items()
    assert 100 <= len(items) <= 200
    assert len({item["text"] for item in items}) == len(items)
    for item in items:
        context, _, last = item["text"].rpartition(" ")
        assert last.isascii()
        assert re.search(rf"\b{re.escape(last)}\b", context) is not None


def test_pages_are_headings_and_prose() -> None:
    for pages in (demo.heldout_pages(), demo.calibration_pages()):
        assert 12 <= len(pages) <= 40
        assert 150_000 <= sum(map(len, pages)) <= 250_000
        assert all(re.match(r"= .+ =\n\n\S", page) for page in pages)
    assert not set(demo.heldout_pages()) & set(demo.calibration_pages())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_context_helps(name: str) -> None:
    figures = record(name)["figures"]["heldout_nll_by_position"]
    assert figures["256-511"] < figures["1-31"] - 0.2


@pytest.mark.parametrize("name", NAMES)
def test_less_attention_costs_quality(name: str) -> None:
    full, narrow, alone = (nll(name, nearest) for nearest in (None, 8, 1))
    assert full == pytest.approx(record(name)["figures"]["nll"]["heldout"], abs=0.4)
    assert narrow > full + 0.1
    assert alone > full + 1.0


@pytest.mark.parametrize("name", NAMES)
def test_heads_differ(name: str) -> None:
    ids, _ = windows(name, 1)
    model = load(name, attn_implementation="eager")  # the stock implementation that returns its weights
    with torch.no_grad():
        weights = torch.stack(model(input_ids=ids, output_attentions=True).attentions)
    entropies = torch.special.entr(weights).sum(-1).mean((1, 3))
    assert entropies.shape == (model.config.num_hidden_layers, model.config.num_attention_heads)
    assert entropies.max() - entropies.min() > 1.0


def test_unknown_demo_model_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"bert, gpt2, llama. Did you mean 'llama'"):
        demo.demo_model_path("lama")
