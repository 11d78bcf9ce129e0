"""WikiText's rules, against lm-evaluation-harness's own functions."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

from adaattn_hf.eval import wikitext

from .conftest import PAGES

# pieces in which the rules differ from one another
PUNCTUATION = (" @-@ ", " @,@ ", " @.@ ", " : ", " ; ", " . ", " ! ", " ? ", " , ", "( a )", "[ b ]", "{ c }")
REST = ('" d "', "' e '", "= = =", "= =", " ° ", " \n", "\n ", " N ", " 's", "s '", "/' [0-9]/", "7", " ", "\u2003")
PIECES = st.sampled_from(("word", *PUNCTUATION, *REST))


@given(st.lists(PIECES, max_size=12).map("".join))
def test_detokenize_and_counts_are_lm_evaluation_harness_s(page: str) -> None:
    assert wikitext.detokenize(page) == wikitext_detokenizer({"page": page})
    theirs = process_results({"page": page}, (0.0,))
    assert wikitext.count_words(page) == theirs["word_perplexity"][1]
    assert len(page.encode("utf-8")) == theirs["byte_perplexity"][1]


def test_pages_are_articles() -> None:
    pages = list(wikitext.split_pages(" \n" + "".join(PAGES)))
    assert [page.split("\n")[0] for page in pages] == [" = The lighthouse = ", " = A river = ", " = Bread = "]
    assert "".join(pages).replace("\n", "") == "".join(PAGES).replace("\n", "")
    # and text before the first title
    assert list(wikitext.split_pages("a preface \n = Title = \n text")) == ["a preface ", " = Title = \n text"]


@pytest.mark.parametrize(
    ("line", "title"),
    [(" = Robert = \n", True), ("= Robert =", True), (" = = Career = = \n", False), (" a = b \n", False), ("", False)],
)
def test_titles(line: str, title: bool) -> None:
    assert len([*wikitext.split_pages(f"before\n{line}")]) == 1 + title


def test_rows_of_datasets_become_the_file_again() -> None:
    lines = ["", " = Title = \n", "", " Some text . \n"]
    assert wikitext.join_rows(lines) == " \n = Title = \n \n Some text . \n"


@pytest.mark.assets
def test_the_real_test_set_has_its_62_articles(assets: Path) -> None:
    pages = list(wikitext.split_pages((assets / "data" / "wiki.test.raw").read_text(encoding="utf-8")))
    assert len(pages) == 62
    # 241,211 words in the file; the rule counts the empty string at both ends of each page, too
    assert sum(map(wikitext.count_words, pages)) == 241_211 + 2 * 62
