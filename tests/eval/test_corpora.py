"""Where text comes from, and what is said when it cannot be had."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import transformers as tf

from adaattn_hf.errors import DataUnavailable, UsageError
from adaattn_hf.eval import corpora, wikitext, windows

from .conftest import PAGES, PASSAGES

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def test_wikitext_from_a_raw_file(texts: Path) -> None:
    corpus = corpora.load(f"wikitext:{texts / 'pages.txt'}")
    assert (corpus.name, corpus.kind, corpus.origin) == ("wikitext", "pages", "pages.txt")
    assert len(corpus.documents) == len(PAGES)
    for document in corpus.documents:
        assert document.text == wikitext.detokenize(document.source)
        assert document.words == wikitext.count_words(document.source)
        assert document.bytes == len(document.source.encode("utf-8"))


@pytest.mark.parametrize("field", ["page", "text"])
def test_wikitext_from_rows_of_pages_or_lines(tmp_path: Path, texts: Path, field: str) -> None:
    raw = (texts / "pages.txt").read_text(encoding="utf-8")
    lines = [line if line.strip() else "" for line in raw.splitlines(keepends=True)]
    rows = [{"page": p} for p in wikitext.split_pages(raw)] if field == "page" else [{"text": t} for t in lines]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    from_rows, from_file = corpora.load(f"wikitext:{path}"), corpora.load(f"wikitext:{texts / 'pages.txt'}")
    assert [d.text.strip() for d in from_rows.documents] == [d.text.strip() for d in from_file.documents]


@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_lambada_from_a_file(tmp_path: Path, texts: Path, form: str) -> None:
    path = texts / "passages.jsonl" if form == "jsonl" else texts / "plain.txt"
    corpus = corpora.load(f"lambada:{path}")
    assert corpus.kind == "lastword"
    assert [d.text for d in corpus.documents] == list(PASSAGES)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    known: dict[str, Any] = {}

    def load_dataset(repository: str, configuration: str | None, split: str) -> Any:
        if repository not in known:
            raise ConnectionError(f"Couldn't reach {repository!r} on the Hub")
        return known[repository][split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return known


def test_wikitext_through_datasets_is_the_file(hub: dict[str, Any], texts: Path) -> None:
    raw = (texts / "pages.txt").read_text(encoding="utf-8")
    rows = [{"text": line if line.strip() else ""} for line in raw.splitlines(keepends=True)]
    hub["Salesforce/wikitext"] = {"test": rows}
    corpus = corpora.load("wikitext")
    assert corpus.origin == "Salesforce/wikitext (wikitext-2-raw-v1) test"
    expected = corpora.load(f"wikitext:{texts / 'pages.txt'}")
    assert [d.text.strip() for d in corpus.documents] == [d.text.strip() for d in expected.documents]


def test_lambada_through_datasets(hub: dict[str, Any]) -> None:
    hub["EleutherAI/lambada_openai"] = {"test": [{"text": passage} for passage in PASSAGES]}
    assert [d.text for d in corpora.load("lambada").documents] == list(PASSAGES)


@pytest.mark.parametrize("name", ["wikitext", "lambada"])
def test_without_a_hub_the_message_names_the_remedy(hub: dict[str, Any], name: str) -> None:
    with pytest.raises(DataUnavailable) as refusal:
        corpora.load(name)
    assert f"--data {name}:PATH" in str(refusal.value)
    assert "Couldn't reach" in str(refusal.value)
    assert refusal.value.exit_code == 3


@pytest.mark.parametrize(("content", "spec", "says"), [
    (None, "{path}", "no file or directory here"), (None, "wikitext:{path}", "does not exist"),
    (None, "lambada:{path}", "does not exist"), ("", "{path}", "no text"),
    ("\n", "wikitext:{path}", "no text"), ("word\n", "lambada:{path}", "at least two words"),
    *(("", f"{{path}}{suffix}", "is a table") for suffix in (".json", ".csv", ".parquet", ".arrow")),
    (b"caf\xe9", "{path}", "as UTF-8"), (None, "{path}.link", "no file or directory here"), (None, "", "no file"),
])  # fmt: skip
def test_what_cannot_be_read(tmp_path: Path, content: str | bytes | None, spec: str, says: str) -> None:
    path = tmp_path / "text.txt"
    place = Path(spec.format(path=path).rpartition(":")[2])
    if place.suffix == ".link":
        place.symlink_to(place)  # which leads to itself
    elif content is not None:
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataUnavailable, match=says):
        corpora.load(spec.format(path=path))


@pytest.mark.parametrize(("line", "says", "kind"), [
    ("{", "line 1 is not JSON", "lambada"), ('{"body": "x"}', "field 'text'", "lambada"),
    ("[1]", "text field 'text'", "lambada"), ('{"body": "x"}', "'page' or 'text'", "wikitext"),
])  # fmt: skip
def test_rows_that_are_none(tmp_path: Path, line: str, says: str, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(DataUnavailable, match=says):
        corpora.load(f"{kind}:{path}")


def test_a_directory_without_texts(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable, match="holds no text, expected files named"):
        corpora.load(str(tmp_path))


def test_a_corpus_is_known_by_its_text() -> None:
    first = corpora.text_corpus(["one", "two"], "here", "x")
    assert first.sha256 == corpora.text_corpus(["one", "two"], "there", "y").sha256
    assert first.sha256 != corpora.text_corpus(["onet", "wo"], "here", "x").sha256
    assert len(first.head(1).documents) == 1
    assert first.head(9) is first


@pytest.mark.parametrize(
    ("passage", "parts"),
    [("a b c", ("a b", " c")), ("one two", ("one", " two")), ("double  space", ("double ", " space"))],
)
def test_the_last_word(passage: str, parts: tuple[str, str]) -> None:
    assert windows.split_passage(passage) == parts


@pytest.mark.parametrize("passage", ["one two", " two", "double  space"])
def test_the_last_word_is_the_end_of_the_whole(llama: Path, passage: str) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(llama)
    window = windows.causal_window(tokenizer, passage, 40, 0, prefix=0)
    whole = tokenizer.encode(passage, add_special_tokens=False)
    assert [*window.input_ids, window.targets[-1]][-len(whole) :] == whole
    assert tokenizer.decode(window.targets).strip() == windows.split_passage(passage)[1].strip()


def test_a_passage_without_a_prompt_needs_a_prefix(llama: Path) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(llama)
    with pytest.raises(UsageError, match="prefix token"):
        windows.causal_window(tokenizer, " two", 40, 3)


def test_a_pipe_is_refused_by_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataUnavailable, match="a pipe or device, which is read but once; expected a file"):
        corpora.load(str(pipe))
