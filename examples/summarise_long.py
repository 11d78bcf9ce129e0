"""Summarise a long document under a loss budget: the prompt is read by a plan, within the loss that you allow.

    python examples/summarise_long.py [MODEL --plan PLAN] [DOCUMENT] [--tokens 900] [--new 60]

MODEL is a directory or a name on the Hub, PLAN what `adaattn calibrate MODEL --budget 1%` wrote. Without them the tiny
LLaMA-class model of the package reads its own pages, offline, and a plan is made first. That model is far too small to
write a real summary; one that was trained to follow instructions (SmolLM2-135M-Instruct, ...) is asked by its template.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import adaattn_hf
from adaattn_hf.eval.demo import demo_model_path, heldout_pages

ASK = "\n\nIn a few words, the text above says that"


def prompt_of(tokenizer: Any, document: str, most: int) -> torch.Tensor:
    """Tokens `[1, n]` that ask for a summary of as much of a document as there is room for."""
    tail = tokenizer(ASK, add_special_tokens=False)["input_ids"]
    text = tokenizer(document, add_special_tokens=False, truncation=True, max_length=most - len(tail))["input_ids"]
    if tokenizer.chat_template is None:
        return torch.tensor([text + tail])
    chat = [{"role": "user", "content": f"Summarise this text in two sentences.\n\n{tokenizer.decode(text)}"}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return asked["input_ids"]


def calibrated(directory: str) -> str:
    """Makes a plan for the packaged model."""
    words = ["-m", "adaattn_hf", "calibrate", "--budget", "1%", "--output-dir", directory, "--quiet"]
    subprocess.run([sys.executable, *words], check=True)  # noqa: S603
    return directory


def main() -> None:
    """Read and write under the plan; say what the plan cost on this very text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(demo_model_path("llama")))
    parser.add_argument("document", nargs="?", type=Path, help="a text file")
    parser.add_argument("--plan", help="directory or name on the Hub; default: one is made for the packaged model")
    parser.add_argument("--tokens", type=int, default=900, help="the longest prompt")
    parser.add_argument("--new", type=int, default=60, help="tokens to write")
    options = parser.parse_args()
    if options.plan is None and options.model != str(demo_model_path("llama")):
        parser.error("--plan is absent, expected the plan of MODEL: adaattn calibrate MODEL --data TEXT --budget 1%")

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="adaattn").eval()
    with tempfile.TemporaryDirectory() as place:
        adaattn_hf.load_plan(model, options.plan or calibrated(place))
    plan = adaattn_hf.plan_of(model)
    document = "\n\n".join(heldout_pages()) if options.document is None else options.document.read_text("utf-8")
    ids = prompt_of(tokenizer, document, options.tokens)

    written = model.generate(ids, max_new_tokens=options.new, do_sample=False, attention_mask=torch.ones_like(ids))
    print(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip())
    with torch.no_grad():
        planned = model(ids, labels=ids).loss
        with adaattn_hf.use_plan(model, None):  # exact, in this block alone
            exact = model(ids, labels=ids).loss
    change = 100 * (torch.exp(planned - exact) - 1)
    allowed = 100 * torch.expm1(torch.tensor(plan.budget))
    print(f"{ids.shape[1]} tokens read; perplexity on this prompt {change:+.2f} %, allowed on average {allowed:+.2g} %")


if __name__ == "__main__":
    main()
