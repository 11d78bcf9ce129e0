"""What an oracle that chooses blocks of keys would save over windows: `python -m studies.kept_blocks MODEL --text A B`.

Per layer, key/value head and block of 128 query rows the oracle sees the true attention, free of charge. It keeps the
first block of keys, the diagonal one, and the fewest others whose mean mass over rows and query heads of the group
leaves out at most a given share. Beside it stands, per head, the smallest window with 16 sinks that loses no more than
the oracle did. Both run through the whole model, so that lost mass, tiles of keys and the loss of the model are of the
same passes. `--write docs/results` keeps them as `kept_blocks.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.eval.provenance import processor, provenance
from studies.pages import loss, table

BLOCK, SINKS = 128, 16
LOST = (0.003, 0.01, 0.03, 0.1)
NAME = "kept_blocks_oracle"


def oracle(mass: Tensor, lost: float) -> Tensor:
    """Boolean `[blocks, blocks]`: the key blocks that each block of queries keeps.

    Args:
        mass: `[blocks, blocks]` mean attention of a block of rows on a block of keys; its rows sum to one.
        lost: Share of the mass that may be left out.
    """
    index = torch.arange(len(mass), device=mass.device)
    forced = (index == 0) | (index == index[:, None])
    ranked, order = mass.masked_fill(forced, 2.0).sort(1, descending=True)
    held = torch.where(ranked > 1.0, mass.gather(1, order), ranked).cumsum(1)
    needed = torch.roll(held, 1, 1) < 1.0 - lost
    needed[:, 0] = True
    return torch.zeros_like(forced).scatter(1, order, needed) | forced & (index <= index[:, None])


def window_tiles(window: int, length: int) -> int:
    """Tiles of 128 x 128 that a causal window with sinks visits."""
    total = 0
    for row in range(0, length, BLOCK):
        first = max(row - window + 1, 0) // BLOCK
        total += row // BLOCK - first + 1 + (first > 0)
    return total


def smallest_window(weights: Tensor, lost: float) -> int:
    """The smallest window, a multiple of 128, beside 16 sinks that leaves out at most `lost` of the mean attention.

    Args:
        weights: `[heads, length, length]` attention of the query heads that share a key/value head.
        lost: Share that may be left out.
    """
    length = weights.shape[-1]
    mean = weights.mean(0)
    rows = torch.arange(length, device=mean.device)
    distance = (rows[:, None] - rows).clamp(min=0)
    mean = mean.masked_fill(rows < SINKS, 0.0)
    by_distance = torch.zeros(length, device=mean.device).scatter_add_(0, distance.flatten(), mean.flatten())
    beyond = by_distance.flip(0).cumsum(0).flip(0) / length  # mass at this distance or farther
    for window in range(BLOCK, length, BLOCK):
        if float(beyond[window]) <= lost:
            return window
    return length


class Oracle:
    """An attention function that measures, and computes by the arm that is set."""

    def __init__(self) -> None:
        """Without an arm: exact attention."""
        self.arm, self.lost, self.at_loss = "exact", 0.0, {}  # type: tuple[str, float, dict[float, list[float]]]
        self.tiles, self.visited, self.left = 0, 0, list[float]()

    def begin(self, arm: str, lost: float) -> None:
        """Start a pass of an arm with empty counts."""
        self.arm, self.lost, self.tiles, self.visited, self.left = arm, lost, 0, 0, []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Causal attention `[1, length, heads, head_dim]` with the keys of the arm alone."""
        groups, length = query.shape[1] // key.shape[1], query.shape[2]
        rows = torch.arange(length, device=query.device)
        causal = rows <= rows[:, None]
        out = torch.empty_like(query)
        for head in range(key.shape[1]):
            own = slice(head * groups, (head + 1) * groups)
            scores = (query[0, own] @ key[0, head].T).float() * kwargs["scaling"]
            weights = scores.masked_fill_(~causal, float("-inf")).softmax(-1)
            if self.arm != "exact":
                weights = self._kept(weights, (kwargs["layer"], head), rows, causal)
            out[0, own] = weights.to(value.dtype) @ value[0, head]
        return out.transpose(1, 2), None

    def _kept(self, weights: Tensor, place: tuple[int, int], rows: Tensor, causal: Tensor) -> Tensor:
        """Weights over the kept keys alone, which sum to one again; counts tiles and the mass that was lost."""
        length, blocks = weights.shape[-1], weights.shape[-1] // BLOCK
        exact = blocks * (blocks + 1) // 2
        if self.arm == "blocks":
            mass = weights.mean(0).view(blocks, BLOCK, blocks, BLOCK).sum(3).mean(1)
            keep = oracle(mass, self.lost)
            visited = int(keep.sum())
            seen = keep.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) & causal
        else:
            allowed = self.at_loss[self.lost][len(self.left)]
            window = smallest_window(weights, allowed)
            visited = min(window_tiles(window, length), exact)
            seen = causal & ((rows[:, None] - rows < window) | (rows < SINKS))
        kept = weights * seen
        held = kept.sum(-1, keepdim=True)
        self.left.append(1.0 - float(held.mean()))
        self.tiles += exact
        self.visited += visited
        return kept / held


def measured(model: nn.Module, tokens: Tensor, attention: Oracle) -> list[dict[str, float]]:
    """One row for each share of lost mass: tiles, KL and increase of the loss of blocks and of windows."""

    @torch.no_grad()
    def logits() -> Tensor:
        found: Tensor = model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return found

    attention.begin("exact", 0.0)
    exact, following = logits(), tokens[0, 1:, None]
    nll, rows = -exact.gather(1, following).mean(), []
    for lost in LOST:
        row = {"lost": lost}
        for arm in ("blocks", "windows"):
            attention.begin(arm, lost)
            own = logits()
            if arm == "blocks":
                attention.at_loss[lost] = attention.left
            row |= {
                f"{arm}_tiles": attention.visited / attention.tiles,
                f"{arm}_mass": sum(attention.left) / len(attention.left),
                f"{arm}_kl": float((exact.exp() * (exact - own)).sum(-1).mean()),
                f"{arm}_increase": float(-own.gather(1, following).mean() - nll),
            }
            del own
        rows.append(row)
    return rows


def page(record: dict[str, Any]) -> str:
    """The page of a record."""
    made = record["provenance"]
    lines = [
        "# Kept blocks of keys, chosen by an oracle",
        "",
        "Written by `studies/kept_blocks.py`, which says what is compared. The oracle sees the true attention: no",
        "real choice of blocks visits fewer tiles at the same lost mass. Mass is not loss: at equal mass blocks cost",
        "less KL than windows, most on code. Yet where the KL is small enough for a budget, the oracle still visits",
        "half of the tiles or more, which scattered tiles and the time to choose them use up. At measured prices no",
        "plan ever took them, and they left.",
        "",
        f"* {record['model']}, {record['tokens']} tokens of each text, {record['dtype']}, all layers and heads",
        f"* {made['device']} ({made['driver']}), host {processor(made)}; torch {made['versions']['torch']}, "
        f"transformers {made['versions']['transformers']}; commit {made['commit']}",
        "* tiles: 128 queries by 128 keys, as a share of exact attention's; KL and increase of the loss in nats/token",
        "",
    ]
    head = ("text", "mass that blocks may lose", "tiles: blocks", "windows", "windows / blocks", "KL: blocks",
            "windows", "increase: blocks", "windows")  # fmt: skip
    rows = [
        (
            text, f"{row['lost']:g}", f"{row['blocks_tiles']:.2f}", f"{row['windows_tiles']:.2f}",
            f"{row['windows_tiles'] / row['blocks_tiles']:.2f}", loss(row["blocks_kl"]), loss(row["windows_kl"]),
            loss(row["blocks_increase"]), loss(row["windows_increase"]),
        )
        for text, found in record["texts"].items()
        for row in found
    ]  # fmt: skip
    return "\n".join([*lines, *table(head, rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the page where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--gguf-file", help="its file in the directory, where it is a GGUF")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="text files, measured one by one")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", type=Path, help="directory of kept_blocks.json and .md")
    options = parser.parse_args(arguments)
    attention = Oracle()
    AttentionInterface.register(NAME, lambda module, *tensors, **kwargs: attention(
        module, *tensors, layer=module.layer_idx, **kwargs
    ))  # fmt: skip
    more = {"gguf_file": options.gguf_file} if options.gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(options.model, **more)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation=NAME, **more
    )
    model = model.to(options.device).eval()
    texts = {}
    for path in options.text:
        tokens = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[
            :, : options.length
        ]
        texts[path.stem] = measured(model, tokens.to(options.device), attention)
    record = {
        "model": options.gguf_file or Path(options.model).name, "tokens": options.length, "dtype": options.dtype,
        "provenance": provenance(torch.device(options.device)), "texts": texts,
    }  # fmt: skip
    print(json.dumps(texts, indent=1))
    if options.write:
        write_atomically(options.write / "kept_blocks.json", json_text(record))
        write_atomically(options.write / "kept_blocks.md", page(record))


if __name__ == "__main__":
    main()
