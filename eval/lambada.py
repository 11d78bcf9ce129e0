"""LAMBADA's task as `lambada_openai` of lm-evaluation-harness states it: say the last word of a passage.

The prompt is the passage without its last word, the target a space and the last word. An item is right where
greedy decoding gives every token of the target; its loss is the nll of the whole word (nats), and the
perplexity is exp of the mean over items. A masked LM sees the passage with all tokens of the last word masked
at once, and must name them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adaattn_hf.errors import UsageError

from .windows import Window, continuation


def split_passage(passage: str) -> tuple[str, str]:
    """(prompt, target): the passage before its last word, and the space and last word after it."""
    words = passage.split(" ")
    return " ".join(words[:-1]), " " + words[-1]


def causal_window(
    tokenizer: Any, passage: str, context: int, document: int, prefix: int | None = None, add_bos: bool | None = None
) -> Window:
    """The window of one passage for a causal LM, tokenised as lm-evaluation-harness does.

    The passage is tokenised whole, the prompt alone, and the target is what the whole has beyond the prompt's
    length.
    """
    prompt, target = split_passage(passage)
    kept = prompt.rstrip()
    target = prompt[len(kept) :] + target
    keywords: dict[str, Any] = {"verbose": False}
    if add_bos is not None:
        keywords["add_special_tokens"] = add_bos
    whole = tokenizer.encode(kept + target, **keywords)
    head = tokenizer.encode(kept, **keywords) if kept else []
    if not head:
        whole = tokenizer.encode(target, add_special_tokens=False, verbose=False)
        if prefix is None:
            raise UsageError(
                f"data: passage {document} has nothing before its last word, and no prefix token to put "
                "there; remove the passage or pass --prefix-token"
            )
        head, whole = [prefix], [prefix, *whole]
    return continuation(head, whole[len(head) :], context, document)


def masked_window(
    tokenizer: Any, passage: str, context: int, document: int, first: Sequence[int], last: Sequence[int]
) -> Window:
    """The window of one passage for a masked LM: all tokens of the last word masked at once.

    `first` and `last` are the special tokens that the tokenizer puts around a text. Where the passage is too
    long, it loses tokens at its beginning.
    """
    prompt, target = split_passage(passage)
    body = tokenizer.encode(prompt.rstrip(), add_special_tokens=False, verbose=False)
    word = tokenizer.encode(target.strip(), add_special_tokens=False, verbose=False)
    if not word:
        raise UsageError(f"data: the last word of passage {document}, {target!r}, gives no token")
    room = context - len(first) - len(last) - len(word)
    if room < 1:
        raise UsageError(f"context: got {context}, expected more than the {len(word)} tokens of passage {document}")
    body = body[-room:]
    input_ids = np.asarray([*first, *body, *[tokenizer.mask_token_id] * len(word), *last], np.int64)
    positions = np.arange(len(first) + len(body), len(first) + len(body) + len(word), dtype=np.int64)
    return Window(document, input_ids, positions, np.asarray(word, np.int64))
