"""Perplexity of a model on a text, with adaattn and with stock attention, by the harness of the package.

    python examples/perplexity.py [MODEL TEXT-FILE] [--tokens 4096]

Without arguments the tiny GPT-2-class model of the package reads its held-out pages, offline. `adaattn eval` does the
same with all options; this shows the calls behind it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from adaattn_hf.eval import corpora, runner
from adaattn_hf.eval.demo import demo_model_path, heldout_pages
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches.checkpoint import load


def main() -> None:
    """Evaluate and print the two perplexities with the difference between them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(demo_model_path("gpt2")))
    parser.add_argument("text", nargs="?", help="a plain text file")
    parser.add_argument("--tokens", type=int, default=4096, help="length of the text that is read")
    arguments = parser.parse_args()

    if arguments.text is None:
        corpus = corpora.wikitext_corpus(heldout_pages(), "held-out pages of the package")
    else:
        corpus = corpora.load(arguments.text)
    settings = Settings(attn_implementation="adaattn", baseline="sdpa", limit_tokens=arguments.tokens)
    with tempfile.TemporaryDirectory() as directory:
        report = runner.evaluate(load(arguments.model), corpus, settings, output=Path(directory))

    for arm in report["quality"]["arms"]:
        print(f"{arm['implementation']:>10}: perplexity {arm['perplexity']:.4f}")
    (comparison,) = report["quality"]["comparisons"]
    difference = comparison["delta_nll"]
    print(f"difference: {difference['mean']:+.2e} nats/token")
    if difference["low"] is not None:  # an interval over documents needs two of them
        print(f"95 % interval over documents: {difference['low']:+.2e} to {difference['high']:+.2e}")


if __name__ == "__main__":
    main()
