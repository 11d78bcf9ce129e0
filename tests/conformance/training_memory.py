"""Measures what a training step holds in memory, with and without checkpointing, per attention
implementation.

    python tests/conformance/training_memory.py docs/results/training_memory.md

Peak of all tensors of a forward and backward pass, parameters and gradients included. On a CUDA device the allocator's
own peak is taken.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import adaattn_hf  # noqa: F401  (registers the names)
from adaattn_hf._files import write_atomically
from adaattn_hf.eval.provenance import processor, provenance

WIDTH, LAYERS, VOCABULARY = 256, 6, 1024
BATCH, LENGTH = 4, 512
IMPLEMENTATIONS = ("eager", "sdpa", "adaattn")


def model_of(implementation: str) -> Any:
    """Returns a GPT-2 so narrow that activations outweigh the parameters, as they do in long-context training."""
    torch.manual_seed(0)
    sizes = {"n_embd": WIDTH, "n_head": WIDTH // 64, "n_layer": LAYERS, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = tf.GPT2Config(**sizes, **ends, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return tf.GPT2LMHeadModel._from_config(config, attn_implementation=implementation).train()


def step(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
    """One forward and backward pass."""
    model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()


def peak_bytes(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> int:
    """Returns the peak of a step."""
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        step(model, ids, mask)
        return int(torch.cuda.max_memory_allocated())
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step(model, ids, mask)
    snapshot = tracker.get_tracker_snapshot("peak")
    return int(sum(device["Total"] for device in snapshot.values()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = provenance(torch.device(device))
    versions = ", ".join(f"{name} {made['versions'][name]}" for name in ("torch", "transformers"))
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[0, LENGTH // 2 :] = 0
    peaks: dict[tuple[str, bool], int] = {}
    for implementation in IMPLEMENTATIONS:
        for checkpointed in (False, True):
            model = model_of(implementation).to(device)
            if checkpointed:
                enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
                enable({"use_reentrant": False})
            step(model, ids, mask)
            model.zero_grad(set_to_none=True)
            peaks[implementation, checkpointed] = peak_bytes(model, ids, mask)
    lines = [
        "# Memory of training, with and without checkpointing",
        "",
        "Made by `tests/conformance/training_memory.py`; do not edit. "
        f"{processor(made) if device == 'cpu' else made['device']}, {made['threads']} thread(s), {versions}, "
        f"commit {made['commit']}.",
        "",
        f"GPT-2, width {WIDTH}, {LAYERS} layers, {BATCH} rows of {LENGTH} tokens, one of them padded to",
        "twice its length, fp32, without dropout, with which attention on a processor makes the whole score matrix.",
        "Peak of all tensors of one step, parameters and gradients included.",
        "",
        "| implementation | checkpointing | peak MiB | of eager without |",
        "|---|---|---:|---:|",
    ]
    base = peaks["eager", False]
    for (implementation, checkpointed), peak in peaks.items():
        switch = "on" if checkpointed else "off"
        lines.append(f"| {implementation} | {switch} | {peak / 2**20:.0f} | {peak / base:.2f} |")
    write_atomically(args.out, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
