"""The texts of a cell that runs in processes, and the batches that an arm makes of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from .grid import Cell


def texts_of(cell: Cell, recipe: Mapping[str, Any], files: Path) -> list[list[int]]:
    """Tokens of each text: of the model's own `text` between its marks, or random."""
    lengths = cell.lengths or [cell.keys] * cell.batch
    if "text" not in recipe:
        random = torch.Generator().manual_seed(0)
        most = recipe.get("ids", 1000)
        return [torch.randint(5, most, (n,), device="cpu", generator=random).tolist() for n in lengths]
    tokenizer = transformers.AutoTokenizer.from_pretrained(files)
    text = Path(os.path.expandvars(recipe["text"])).read_text(encoding="utf-8")[: 16 * sum(lengths)]
    ids = iter(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    first, last = ([], []) if recipe["causal"] else ([tokenizer.cls_token_id], [tokenizer.sep_token_id])
    return [[*first, *(next(ids) for _ in range(n - len(first + last))), *last] for n in lengths]


def cut(texts: Sequence[Sequence[int]], how: Sequence[str]) -> list[list[int]]:
    """Rows of each batch: one of all, or the longest first, four or one text each."""
    if not {"each text alone", "sorted into four"} & set(how):
        return [list(range(len(texts)))]
    order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
    size = -(-len(order) // 4) if "sorted into four" in how else 1
    return [order[at : at + size] for at in range(0, len(order), size)]


def batch(texts: Sequence[list[int]]) -> dict[str, list[list[int]]]:
    """Padded to the longest."""
    missing = [max(map(len, texts)) - len(ids) for ids in texts]
    return {
        "input_ids": [ids + [0] * more for ids, more in zip(texts, missing, strict=True)],
        "attention_mask": [[1] * len(ids) + [0] * more for ids, more in zip(texts, missing, strict=True)],
    }
