"""Times a model under the kernel's name against the same model under `adaattn` with `prepare`, and stock attention.

`make hub-speed`, or `.venv-hub/bin/python hub/speed.py [--rounds N] [--write docs/results]` on what `make hub-kernel`
built. One thread unless `--threads` says otherwise. The three arms run in turn, in an order that turns every round;
ratios are of process time, median over rounds with the quartiles. Every arm's answer is compared with stock attention
before the clock starts.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "adaattn/flash-adaattn"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LOCAL_KERNELS", f"{NAME}={ROOT / 'build' / 'hub' / 'flash-adaattn'}")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from torch import Tensor  # noqa: E402

import adaattn_hf  # noqa: E402
from adaattn_hf._files import write_atomically  # noqa: E402
from adaattn_hf.eval.timing import measure, spread  # noqa: E402

ARMS = ("string", "adaattn", "sdpa")
Answer = Callable[[str], Tensor]
"""What an arm answers, by its name."""
DECODER: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0,
)  # fmt: skip


def models(config: Any, head: Any) -> dict[str, Any]:
    """The same weights under each arm's attention, `prepare`d where that is ours."""
    found: dict[str, Any] = {}
    for arm, name in zip(ARMS, (NAME, "adaattn", "sdpa"), strict=True):
        torch.manual_seed(0)
        model = head.from_config(copy.deepcopy(config), attn_implementation=name).eval()
        found[arm] = adaattn_hf.prepare(model) if arm == "adaattn" else model
    return found


def bert_batch() -> Answer:
    """32 sentences of 8 to 128 tokens in a BERT of MiniLM's size.

    The string gets them flattened, as sentence-transformers hands them over.
    """
    config = tf.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    lengths = torch.randint(8, 129, (32,)).tolist()
    rows = [torch.randint(5, 30000, (length,)) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    sums = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    flat: dict[str, Any] = dict(
        input_ids=torch.cat(rows)[None], position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        cu_seq_lens_q=sums, cu_seq_lens_k=sums, max_length_q=max(lengths), max_length_k=max(lengths),
    )  # fmt: skip
    padded: dict[str, Any] = dict(input_ids=ids, attention_mask=mask.long())
    made = models(config, tf.AutoModel)

    def answer(arm: str) -> Tensor:
        if arm == "string":
            out: Tensor = made[arm](**flat).last_hidden_state[0]
            return out
        padded_out: Tensor = made[arm](**padded).last_hidden_state
        return padded_out[mask]

    return answer


def packed() -> Answer:
    """Sixteen documents of 16 to 256 tokens in one row of a decoder with grouped heads."""
    lengths = torch.randint(16, 257, (16,)).tolist()
    ids = torch.randint(5, 4096, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    made = models(tf.LlamaConfig(**DECODER), tf.AutoModelForCausalLM)
    return lambda arm: made[arm](input_ids=ids, position_ids=positions, use_cache=False).logits[0]


def windowed() -> Answer:
    """2,048 tokens in a decoder whose layers look 256 tokens back."""
    ids = torch.randint(5, 4096, (1, 2048))
    made = models(tf.MistralConfig(**DECODER, sliding_window=256), tf.AutoModelForCausalLM)
    return lambda arm: made[arm](input_ids=ids, use_cache=False).logits[0]


def decode() -> Answer:
    """Sixteen greedy tokens behind four prompts of 512 tokens."""
    ids = torch.randint(5, 4096, (4, 512))
    made = models(tf.LlamaConfig(**DECODER), tf.AutoModelForCausalLM)
    asked: dict[str, Any] = dict(max_new_tokens=16, min_new_tokens=16, do_sample=False)
    mask = torch.ones_like(ids)
    return lambda arm: made[arm].generate(ids, attention_mask=mask, **asked).float()


def training() -> Answer:
    """Forward and backward of four rows of 64 to 256 tokens; the answer is a gradient.

    The string gets them flattened, as TRL hands them over with `padding_free`; the others padded on the right.
    """
    lengths = [64, 256, 120, 200]
    rows = [torch.randint(5, 4096, (length,)) for length in lengths]
    mask = torch.arange(256)[None] < torch.tensor(lengths)[:, None]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    padded: dict[str, Any] = dict(input_ids=ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100))
    flat: dict[str, Any] = dict(
        input_ids=torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        labels=torch.cat([torch.cat([torch.tensor([-100]), row[1:]]) for row in rows])[None],
    )
    made = models(tf.LlamaConfig(**DECODER), tf.AutoModelForCausalLM)

    def step(arm: str) -> Tensor:
        model = made[arm].train()
        with torch.enable_grad():
            model.zero_grad(set_to_none=True)
            model(**(flat if arm == "string" else padded)).loss.backward()
        gradient: Tensor = model.model.layers[0].self_attn.q_proj.weight.grad
        return gradient.clone()

    return step


CELLS: Mapping[str, Callable[[], Answer]] = {
    "BERT batch": bert_batch, "packed": packed, "windowed": windowed, "decode": decode, "training": training,
}  # fmt: skip


def time_cell(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of process time of each arm, and the string's ratio to the others; how far answers lie apart."""
    torch.manual_seed(0)
    answer = CELLS[name]()
    work = {arm: partial(answer, arm) for arm in ARMS}
    right = answer("sdpa")
    apart = {arm: float((answer(arm) - right).abs().max()) for arm in ARMS}
    seconds = {arm: times["process"] for arm, times in measure(work, rounds, torch.device("cpu")).items()}
    ratios = {
        other: spread([a / b for a, b in zip(seconds["string"], seconds[other], strict=False)]) for other in ARMS[1:]
    }
    return {
        "cell": name,
        "milliseconds": {arm: spread([1e3 * s for s in times]) for arm, times in seconds.items()},
        "string_to": ratios,
        "largest_difference_to_sdpa": apart,
    }


def table(report: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# A model under the kernel's name, beside `adaattn` with `prepare` and stock attention",
        "",
        f"{report['machine']}, {report['threads']} thread(s), torch {report['torch']}, transformers "
        f"{report['transformers']}; process time in ms, {report['rounds']} interleaved rounds. Ratios below 1: "
        "the string is faster (quartiles).",
        "",
        "| cell | string | adaattn + prepare | sdpa | string : adaattn | string : sdpa | largest difference |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in report["cells"]:
        times = " | ".join(f"{cell['milliseconds'][arm]['median']:.2f}" for arm in ARMS)
        ratios = " | ".join(
            f"{r['median']:.3f} ({r['quartile_25']:.3f}–{r['quartile_75']:.3f})" for r in cell["string_to"].values()
        )
        lines.append(f"| {cell['cell']} | {times} | {ratios} | {cell['largest_difference_to_sdpa']['string']:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Times what is asked for, prints the table, and writes it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="samples per arm and cell")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch and the kernels")
    parser.add_argument("--cells", nargs="*", choices=CELLS, default=list(CELLS), help="cells to time")
    parser.add_argument("--write", type=Path, help="directory that gets hub_kernel.json and hub_kernel.md")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with torch.no_grad():
        cells = [time_cell(name, asked.rounds) for name in asked.cells]
    report = {
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}", "threads": asked.threads,
        "torch": torch.__version__, "transformers": tf.__version__, "rounds": asked.rounds, "cells": cells,
    }  # fmt: skip
    print(table(report))
    if asked.write is not None:
        write_atomically(asked.write / "hub_kernel.json", json.dumps(report, indent=1) + "\n")
        write_atomically(asked.write / "hub_kernel.md", table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
