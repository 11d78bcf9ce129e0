"""Embed a ragged batch with sentence-transformers, with and without padding.

    python examples/sentence_transformers_unpad.py MODEL [--sentences 64]

MODEL is a directory or a name on the Hub whose encoder is of the BERT kind (all-MiniLM-L6-v2, bge-small-en-v1.5, ...).

`encode` sorts what it is given by length, so that large jobs pad little. What padding costs shows where one batch
holds short and long texts: a server's requests, a retrieval's hits, a training step. Here all sentences are one batch.
"""

from __future__ import annotations

import argparse
import random
import re
import time

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

import adaattn_hf

TEXT = "the cat sat on a mat while rain fell over old roofs and slow rivers carried light away from town"
WORDS = re.findall(r"\w+", TEXT)


def ragged(count: int, seed: int = 0) -> list[str]:
    """Sentences of 4 to 400 words, most of them short."""
    draw = random.Random(seed)  # noqa: S311
    return [" ".join(draw.choices(WORDS, k=int(4 * 100 ** draw.random()))) for _ in range(count)]


def timed(model: SentenceTransformer, sentences: list[str]) -> tuple[Tensor, float]:
    """Embeddings of one batch, and seconds."""
    start = time.perf_counter()
    embeddings = model.encode(sentences, batch_size=len(sentences), convert_to_tensor=True, show_progress_bar=False)
    return embeddings.cpu(), time.perf_counter() - start


def main() -> None:
    """Compare both ways on the same sentences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sentences", type=int, default=64)
    options = parser.parse_args()

    settings = {"dtype": torch.float32}
    stock = SentenceTransformer(options.model, model_kwargs={"attn_implementation": "sdpa", **settings})
    ours = SentenceTransformer(options.model, model_kwargs={"attn_implementation": "adaattn", **settings})
    adaattn_hf.prepare(ours)

    sentences = ragged(options.sentences)
    for model in (stock, ours):
        timed(model, sentences[:4])  # the first call warms up
    expected, stock_seconds = timed(stock, sentences)
    actual, our_seconds = timed(ours, sentences)
    ratio = stock_seconds / our_seconds
    print(f"stock sdpa {stock_seconds:.2f} s, unpadded {our_seconds:.2f} s: {ratio:.1f} times as fast")
    print(f"largest difference of an embedding: {torch.amax(abs(expected - actual)):.1e}")
    print(f"forward passes: {adaattn_hf.unpad_calls(ours)}")


if __name__ == "__main__":
    main()
