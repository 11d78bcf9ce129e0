"""Memory and time of each phase of a calibration, on a LLaMA of a given shape with random weights and random text.

    python -m studies.calibration_memory 8b 8192,16384 calibration_memory.json

Every letter of the text is a token; losses mean nothing. Peaks are of what torch holds on a CUDA device, and of the
process's resident memory so far on a CPU.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adaattn_hf.calibration.calibrate import CalibrationSettings, decided, measured
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.patches.plans.subject import Subject

SHAPES = {  # vocabulary, width, width of the MLP, layers, heads, key/value heads
    "8b": (128_256, 4096, 14_336, 32, 32, 8),
    "1.5b": (151_936, 1536, 8960, 28, 12, 2),
    "135m": (49_152, 576, 1536, 30, 9, 3),
}
FIRST_LETTER = 0x20000


def phases_of(model: LlamaForCausalLM, length: int, budget: float) -> dict[str, Any]:
    """Calibrates at one length; returns what was said, and seconds and peak of each phase."""
    settings = CalibrationSettings(budget, (length,), most_held_out=12, tries=1, bolder=0)
    count = (settings.sequences + settings.joint + settings.held_out + 1) * length
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=count).tolist()
    phases: list[dict[str, Any]] = [{"phase": "opening", "seconds": -time.perf_counter()}]
    said: list[str] = []

    def entered(stage: str, done: int, total: int) -> None:
        if stage != phases[-1]["phase"]:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if model.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            phases[-1] |= {"seconds": phases[-1]["seconds"] + time.perf_counter(), "peak_gb": peak / 1e9}
            phases.append({"phase": stage, "seconds": -time.perf_counter()})

    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(chr(FIRST_LETTER + token) for token in tokens), encoding="utf-8")
        measurement = measured(
            Subject(model), lambda words: [ord(one) - FIRST_LETTER for one in words], [text], settings,
            progress=entered, say=said.append,
        )  # fmt: skip
        result = decided(measurement)
    entered("", 0, 0)
    return {"length": length, "sentence": result.sentence, "said": said, "phases": phases[:-1]}


def main(shape: str, lengths: str, write: Path, device: str = "cuda", budget: float = 0.01) -> None:
    """Measures one shape at some lengths, such as 8192,16384, and writes JSON behind each."""
    asked, rows = [int(one) for one in lengths.split(",")], []
    vocabulary, width, mlp, layers, heads, kv_heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, dtype=torch.bfloat16,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=max(asked),
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, attn_implementation="adaattn").eval()
    for length in asked:
        rows.append(phases_of(model, length, budget))
        words = {"shape": shape, "provenance": provenance(model.device), "rows": rows}
        write.write_text(json.dumps(words, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
