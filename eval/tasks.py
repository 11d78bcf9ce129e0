"""A corpus and a model into windows: what exactly is scored, and the sentence that says so."""

from dataclasses import dataclass

from adaattn_hf.errors import ModelUnavailable, UsageError
from adaattn_hf.patches.checkpoint import Checkpoint, prefix_token

from . import windows
from .corpora import Corpus
from .objectives import special_tokens
from .settings import Settings
from .windows import TokenWindow


@dataclass(frozen=True)
class Task:
    """What is scored; words and bytes are None where a document was cut short or only sampled."""

    windows: tuple[TokenWindow, ...]
    protocol: str
    words: int | None
    bytes: int | None
    context: int


def check(corpus: Corpus, settings: Settings) -> None:
    """Refuses settings that do not fit a text, which needs no model (UsageError)."""
    if corpus.kind == "lastword" and settings.limit_tokens is not None:
        raise UsageError(
            f"limit_tokens: got {settings.limit_tokens} for {corpus.name}, whose last-word items are not cut; pass "
            "--limit-docs instead"
        )


def build(checkpoint: Checkpoint, corpus: Corpus, settings: Settings) -> Task:
    """The windows of a corpus for a model. Raises UsageError for settings that do not fit the model or the text."""
    check(corpus, settings)
    context, longest = settings.context, checkpoint.max_length
    if context is None and longest is None:
        raise UsageError(f"context: the config of {checkpoint.name} names no maximum; pass --context 1024, say")
    if context is not None and longest is not None and context > longest:
        raise UsageError(
            f"context: got {context}, expected at most the {longest} tokens that {checkpoint.name} was made for"
        )
    if checkpoint.objective == "masked" and checkpoint.tokenizer.mask_token_id is None:
        raise ModelUnavailable(f"tokenizer: {checkpoint.name}'s has no mask token, which a masked LM is scored with")
    make = _last_words if corpus.kind == "lastword" else _pages
    task = make(checkpoint, corpus, settings, context or longest or 0)
    size = getattr(checkpoint.model.config.get_text_config(), "vocab_size", None)
    parts = [part for window in task.windows for part in (window.input_ids, window.targets)]
    lowest, highest = min(part.min() for part in parts), max(part.max() for part in parts)
    if isinstance(size, int) and not 0 <= lowest <= highest < size:
        raise UsageError(
            f"tokenizer: gives the token {lowest if lowest < 0 else highest}, expected one of the {size} that "
            f"{checkpoint.name} knows; leave --tokenizer and --prefix-token out, or give those of this model"
        )
    return task


def _encoded(checkpoint: Checkpoint, corpus: Corpus, settings: Settings) -> tuple[list[list[int]], bool]:
    keywords = {} if checkpoint.objective == "causal" else {"add_special_tokens": False}
    left = settings.limit_tokens
    encoded: list[list[int]] = []
    for document in corpus.documents:
        if left is not None and left <= 0:
            return encoded, False
        # One character gives at most a few tokens less than one: 32 characters a token are more than enough.
        text = document.text if left is None else document.text[: 32 * left + 64]
        tokens = checkpoint.tokenizer.encode(text, verbose=False, **keywords)
        if left is not None and (len(tokens) > left or len(text) < len(document.text)):
            return [*encoded, tokens[:left]], True
        encoded.append(tokens)
        left = None if left is None else left - len(tokens)
    return encoded, False


def _pages(checkpoint: Checkpoint, corpus: Corpus, settings: Settings, context: int) -> Task:
    encoded, cut = _encoded(checkpoint, corpus, settings)
    stride, (first, last) = settings.stride or context, special_tokens(checkpoint.tokenizer)
    special = "; the tokenizer adds no special tokens"
    if first or last:
        special = f"; the tokenizer adds {first} before and {last} after each document, which count as its tokens"
    made: list[TokenWindow] = []
    if checkpoint.objective == "masked":
        if settings.stride is not None:
            raise UsageError("stride: a masked LM's pieces are disjoint; leave --stride out")
        mask, fraction, seed = checkpoint.tokenizer.mask_token_id, settings.mask_fraction, settings.seed
        for i, tokens in enumerate(encoded):
            made += windows.masked(tokens, context, mask, first, last, fraction=fraction, seed=seed, document=i)
        sample = f"a random {fraction:g} of the tokens of each piece (seed {seed})"
        protocol = (
            f"masked-LM pseudo-perplexity: disjoint pieces of at most {context} tokens with the tokenizer's "
            f"special tokens around them; {'every token of the text' if fraction == 1 else sample} scored, one forward "
            "pass with one mask per scored token"
        )
        cut, special = cut or fraction < 1, ""
    elif settings.windows == "rolling":
        asked = settings.prefix_token
        prefix = prefix_token(checkpoint.tokenizer, checkpoint.name) if asked is None else asked
        for i, tokens in enumerate(encoded):
            made += windows.rolling(tokens, context, stride, prefix, i)
        protocol = (
            f"rolling windows (lm-evaluation-harness): context {context}, stride {stride}, prefix token "
            f"{prefix} before each document; every token scored once"
        )
    else:
        for i, tokens in enumerate(encoded):
            made += windows.strided(tokens, context, stride, i)
        scored = "token scored once but the first of each window" if stride == context else "token but the first once"
        protocol = (
            f"strided windows (Transformers' documentation): context {context}, stride {stride}, no prefix; "
            f"every {scored}"
        )
    if not made:
        raise UsageError(f"data: {corpus.origin} gives this tokenizer no token to score; give a longer text")
    used = corpus.documents[: len(encoded)]
    words, size = (None, None) if cut else (sum(d.words for d in used), sum(d.bytes for d in used))
    return Task(tuple(made), protocol + special, words, size, context)


def _last_words(checkpoint: Checkpoint, corpus: Corpus, settings: Settings, context: int) -> Task:
    tokenizer = checkpoint.tokenizer
    texts = [d.text for d in corpus.documents]
    if checkpoint.objective == "masked":
        first, last = special_tokens(checkpoint.tokenizer)
        made = [windows.masked_window(tokenizer, text, context, i, first, last) for i, text in enumerate(texts)]
        how = "all tokens of the last word masked at once"
    else:
        prefix = settings.prefix_token
        made = [windows.causal_window(tokenizer, text, context, i, prefix) for i, text in enumerate(texts)]
        how = "the passage without its last word is the prompt, a space and the last word the target"
    protocol = (
        f"last word of each passage (lambada_openai): {how}; right where the most probable tokens are all "
        f"the target's; perplexity over whole words; context {context}"
    )
    return Task(tuple(made), protocol, len(made), None, context)
