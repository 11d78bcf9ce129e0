"""Measures the figures of the first page: `python -m studies.front FILE CELL...`, each cell once.

Cells that FILE has are kept, so that an interrupted run goes on. Without FILE the names of all cells are printed.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.patches.checkpoint import resolve_device

from .jobs import BIG, LLAMA8, QWEN05, QWEN15, ROUNDS, Job, Shape, encoders, measure, noted, prompt, steps, told
from .served import requests, training

UNSORTED = (512, 210, 120, 80, 60, 40, 31, 12)
SORTED = (128, 126, 125, 124, 122, 121, 120, 118)
Make = Callable[[torch.device, str | None], Job]
LARGE: Any = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
XLMR = partial(hf.XLMRobertaConfig, vocab_size=250002, type_vocab_size=1)
BERT: Shape = "BERT-base", hf.BertModel, hf.BertConfig()
BERT_LARGE: Shape = "BERT-large", hf.BertModel, hf.BertConfig(**LARGE)
MODERN: Shape = "ModernBERT-base's shape", hf.ModernBertModel, hf.ModernBertConfig()
BGE_M3: Shape = "BGE-M3's shape", hf.XLMRobertaModel, XLMR(**LARGE, max_position_embeddings=8194)
EMBEDDER: Shape = "XLM-R base's shape", hf.XLMRobertaModel, XLMR(max_position_embeddings=514)
RERANKER: Shape = "Reranker of XLM-R base's shape", hf.XLMRobertaForSequenceClassification, EMBEDDER[2]
PAIRS = {"reranker": RERANKER, "embedder": EMBEDDER, "modernbert": MODERN}


def shuffled(lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths in no order."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(lengths[at] for at in order)


def spread(rows: int) -> tuple[int, ...]:
    """Lengths of so many texts up to 512 tokens, mostly short, in no order: 37 % of a padded batch is real."""
    return shuffled([max(12, round(512 * (row / rows) ** 1.7)) for row in range(1, rows + 1)])


def pairs(rows: int) -> tuple[int, ...]:
    """Lengths of so many queries with a passage of MS MARCO's kind, in no order: assumed, not counted."""
    # quantiles of a log-normal: median 80 tokens, 88 % below 160, one in a thousand above 512, where it is cut
    normal = statistics.NormalDist(math.log(80), 0.6)
    return shuffled([min(512, round(math.exp(normal.inv_cdf((row + 0.5) / rows)))) for row in range(rows)])


ANEW = "and compiled anew for every shape"
SLOW = f"2.3 times our time in the attention of a 16k prompt (docs/results/gpu.md), {ANEW}"
COMPILED = {"flex_attention": f"slower than sdpa in the attention of 4k (BENCHMARKS.md), {ANEW}"}
LEFT_OUT = {"flex_attention": SLOW, "eager": BIG}
MASKED = {"sdpa": "its mask has a place for every key of every request; it is timed behind shorter prompts"}


def _encoders(shape: Shape, lengths: Sequence[int], *more: Any, absent: Mapping[str, str] = LEFT_OUT) -> Make:
    return lambda device, _: encoders(device, lengths, shape, absent, *more)


CPU: dict[str, Make] = {
    f"{kind} {dtype}": _encoders(BERT, lengths, dtype, 0, True, absent={})
    for kind, lengths in (("unsorted", UNSORTED), ("sorted", SORTED), ("query", (14,)))
    for dtype in ("float32", "bfloat16")
}
CPU |= {
    "step 4k": lambda device, of: steps(device, 1, 4096, QWEN05, of, COMPILED),
    "step 16k": lambda device, of: steps(device, 1, 16384, QWEN05, of, COMPILED),
    "prompt 128": lambda device, of: prompt(device, 1, 128, QWEN05, of, absent=COMPILED),
    "prompt 4k": lambda device, of: prompt(device, 1, 4096, QWEN05, of, absent=COMPILED),
}


def _prompt(batch: int, length: int, absent: Mapping[str, str], left: bool = False) -> Make:
    return lambda device, of: prompt(device, batch, length, QWEN15, of, left, absent)


def _steps(batch: int, length: int) -> Make:
    return lambda device, of: steps(device, batch, length, QWEN15, of, {"flex_attention": SLOW}, 10)


CELLS: dict[str, Make] = CPU | {
    "gpu encoder large 64": _encoders(BERT_LARGE, spread(64), absent={}),
    "gpu encoder base 32": _encoders(BERT, spread(32), "bfloat16", 0, True, absent={"flex_attention": SLOW}),
    "gpu encoder large 256": _encoders(BERT_LARGE, spread(256)),
    **{
        f"gpu {name} {count}{more}": _encoders(shape, pairs(count), *how)
        for name, shape in PAIRS.items()
        for count, more, *how in ((64, ""), (256, ""), (256, " float16", "float16"), (256, " sorted", "bfloat16", 32))
    },
    **{
        f"gpu long encoder {shape[0].partition('-')[0].lower()}{more}": _encoders(shape, lengths)
        for shape in (BGE_M3, MODERN)
        for more, lengths in (("", (8192,) * 4), (" unequal", (8192, 2048, 6144, 4096)))
    },
    "gpu prompt 2k": _prompt(1, 2048, {"flex_attention": SLOW}),
    "gpu prompt 16k": _prompt(1, 16384, LEFT_OUT),
    "gpu prompt 8 x 4k left-padded": _prompt(8, 4096, {"eager": BIG}, True),
    "gpu prompt 32k": _prompt(1, 32768, LEFT_OUT),
    "gpu prompt 8 x 4k": _prompt(8, 4096, LEFT_OUT),
    "gpu step 16k": _steps(1, 16000),
    "gpu step 8 x 4k": _steps(8, 4000),
    "gpu training": lambda device, _: training(device, 16, 1024),
    "gpu training 8 x 2k": lambda device, _: training(device, 8, 2048, packed=False),
    **{f"gpu requests {count}": partial(requests, count=count) for count in (8, 32)},
    **{f"gpu requests {count} x 8k": partial(requests, count=count, prompt=8000, absent=MASKED) for count in (8, 32)},
    "gpu requests 32 x 32k": partial(requests, count=32, prompt=32700, absent=MASKED),
    **{
        f"gpu requests {count} x 32k 8B": partial(requests, count=count, prompt=32700, sizes=LLAMA8, absent=MASKED)
        for count in (4, 8)
    },
}
"""All cells by name; those of a GPU begin with `gpu`."""


def main() -> None:
    """Measures cells that FILE does not have."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("file", type=Path, nargs="?", help="JSON that cells are kept in")
    words.add_argument("cells", nargs="*", help="their names")
    words.add_argument("--model", help="directory of a language model (default: its shape, with random weights)")
    words.add_argument("--rounds", type=int, default=ROUNDS, help="fewer for a trial, which no page takes")
    asked = words.parse_args()
    if asked.file is None:
        sys.stdout.write("\n".join(CELLS) + "\n")
        return
    if strange := set(asked.cells) - CELLS.keys():
        words.error(f"CELL: got {', '.join(sorted(strange))}, expected some of {', '.join(CELLS)}")
    file: Path = asked.file
    for name in asked.cells:
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if name in kept:
            continue
        began = time.perf_counter()
        device = resolve_device("cuda" if name.startswith("gpu") and torch.cuda.is_available() else "cpu")
        job = CELLS[name](device, asked.model)
        record = noted(job, device, measure(job, device, asked.rounds))
        job.after()
        del job
        gc.collect()
        torch.cuda.empty_cache()
        write_atomically(file, json_text(kept | {name: record}, indent=1, sort_keys=True) + "\n")
        told(name, time.perf_counter() - began, record)


if __name__ == "__main__":
    main()
