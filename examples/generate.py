"""Generate text with adaattn, and see that stock attention says the same.

    python examples/generate.py [MODEL] [--prompt TEXT] [--tokens 40]

MODEL is a directory or a name on the Hub; without one, the tiny LLaMA-class model of the package is used, offline.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import adaattn_hf  # registers the name "adaattn"
from adaattn_hf.eval.demo import demo_model_path


def main() -> None:
    """Generate greedily with both implementations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(demo_model_path("llama")))
    parser.add_argument("--prompt", default="The people of the United States have always")
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, attn_implementation="adaattn").eval()
    print(adaattn_hf.explain(model))

    inputs = tokenizer(arguments.prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))

    model.set_attn_implementation("sdpa")
    stock = model.generate(**inputs, max_new_tokens=arguments.tokens, do_sample=False)
    print("same tokens as stock sdpa:", torch.equal(ids, stock))


if __name__ == "__main__":
    main()
