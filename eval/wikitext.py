"""WikiText by lm-evaluation-harness's rules: pages, the words and bytes that are counted, the text that is read.

Three rules decide the figures. A page is an article. Its words and bytes are counted in the page *as it came*, before
detokenisation: `len(re.split(r"\\s+", page))` words (which counts the empty strings at both ends) and the length of its
UTF-8. The model reads the detokenised page.
"""

import re
from collections.abc import Iterable, Iterator

_TITLE = re.compile(r"^ ?= (?!=)(.*[^=]) = ?$")
"""A line with an article's title, ` = Title = `, and not a section's, ` = = Section = = `."""
_REPLACEMENTS_BEFORE = (
    (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" : ", ": "), (" ; ", "; "), (" . ", ". "), (" ! ", "! "),
    (" ? ", "? "), (" , ", ", "),
)  # fmt: skip
_TIGHTEN = (
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
)
_REPLACEMENTS_AFTER = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"), (" \n", "\n"),
    ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


def detokenize(page: str) -> str:
    """The page as running text: WikiText's spaces around punctuation and its @-marks undone.

    The order of the replacements is part of the definition: it is that of lm-evaluation-harness's
    `wikitext_detokenizer` (its rule for `/' [0-9]/`, which matches those very characters only, included).
    """
    text = page.replace("s '", "s'")
    text = re.sub(r"/' [0-9]/", r"/'[0-9]/", text)
    for old, new in _REPLACEMENTS_BEFORE:
        text = text.replace(old, new)
    for pattern, replacement in _TIGHTEN:
        text = pattern.sub(replacement, text)
    for old, new in _REPLACEMENTS_AFTER:
        text = text.replace(old, new)
    return text


def count_words(page: str) -> int:
    """Words of a page by lm-evaluation-harness's rule (before detokenisation)."""
    return len(re.split(r"\s+", page))


def split_pages(text: str) -> Iterator[str]:
    """The articles of a WikiText file, each from its title to the line before the next title.

    What stands before the first title, if it is more than white space, is a page of its own.
    """
    pages: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _TITLE.match(line):
            pages.append([])
        pages[-1].append(line)
    return filter(str.strip, map("\n".join, pages))


def join_rows(rows: Iterable[str]) -> str:
    """The file that the rows of the `datasets` version came from: it stores blank lines as empty strings."""
    return "".join(row or " \n" for row in rows)
