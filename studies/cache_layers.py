"""Would a cache with a format for each layer be worth it? `python -m studies.cache_layers --model DIR --text FILE`.

Every row of a text is read over codes, as decoding reads it: first with 8-bit keys and 4-bit values (`k8v4`) in one
layer and 8 bits in the others, then with `k8v4` in the least sensitive layers, more and more of them. Layers are ranked
on one half of the windows; the losses of the page are those of the other half.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor, nn

from adaattn_hf._files import write_atomically
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.tap import tapping
from adaattn_hf.backends import select
from adaattn_hf.calibration.over_codes import over_codes
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.stats.paired import clustered_ratio, score_tokens

from .cache import of_text
from .cache_text import CONFIDENCE

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the layers that keep values of four bits."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@torch.no_grad()
def logits(model: Any, tokens: Tensor, fewer: Collection[int] | None) -> Tensor:
    """Logits `[n - 1, vocab]` of tokens `[n]` over codes, `k8v4` in the layers `fewer`; over numbers for None."""

    def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if fewer is not None:
            request = over_codes(request, "k8v4" if layer in fewer else "int8")
        return select.attend(request).out

    with tapping(tap):
        found: Tensor = model(tokens[None], use_cache=False).logits[0, :-1]
    return found


def losses(model: Any, windows: Tensor, ways: dict[str, Collection[int]]) -> dict[str, dict[str, float]]:
    """KL and Δnll of each way to store, nats/token, and the upper bound of Δnll."""
    kl: dict[str, list[float]] = {name: [] for name in ways}
    delta: dict[str, list[float]] = {name: [] for name in ways}
    for window in windows:
        exact = logits(model, window, None)
        for name, fewer in ways.items():
            score = score_tokens((exact, logits(model, window, fewer)), window[1:])
            kl[name].append(float(score.kl.mean()))
            delta[name].append(float(score.delta.sum()))
    found = {}
    for name in ways:
        ratio = clustered_ratio(np.array(delta[name]), np.full(len(windows), windows.shape[1] - 1))
        found[name] = {
            "kl": float(np.mean(kl[name])),
            "delta_nll": ratio.mean,
            "upper": ratio.upper(CONFIDENCE),
        }
    return found


def page(found: dict[str, Any]) -> str:
    """The results as a page."""
    made, base = found["provenance"], found["alone"]["none"]["kl"]
    more = {int(name): row["kl"] - base for name, row in found["alone"].items() if name != "none"}
    lines = [
        "# A cache format for each layer",
        "",
        f"`python -m studies.cache_layers`, {found['of']}, {made['cpu']}, commit {made['commit']}. Every row reads "
        "codes as decoding does: `int8`, or `k8v4` in some layers. Layers are ranked by what `k8v4` in them alone adds "
        f"to the KL of `int8`, on {found['windows']} windows of {found['window']} tokens; the table is of as many "
        "others. Bytes are those of keys, values and scales, as a share of a cache in 16 bits.",
        "",
        "| layers in `k8v4` | bytes | KL | Δnll | at most |",
        "|---|---|---|---|---|",
        *(
            f"| {row['layers']} of {found['layers']} | {row['bytes']:.3f} | {row['kl']:.2e} | "
            f"{row['delta_nll']:+.2e} | {row['upper']:+.2e} |"
            for row in found["mixed"]
        ),
        "",
        f"KL that `k8v4` adds in one layer: {min(more.values()):.1e} to {max(more.values()):.1e}, median "
        f"{float(np.median(list(more.values()))):.1e}, for 1/{found['layers']} of what it saves. From the least on: "
        f"{', '.join(f'{layer} ({more[layer]:.1e})' for layer in sorted(more, key=more.__getitem__))}.",
    ]
    return "\n".join(lines) + "\n"


@app.command()
def main(
    write: Annotated[Path, typer.Option(help="Directory of cache_layers.json and cache_layers.md.")],
    model: Annotated[Path, typer.Option(help="A causal LM: a directory.")],
    text: Annotated[Path, typer.Option(help="Text.")],
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    windows: Annotated[int, typer.Option(help="Windows to rank layers on; as many others are measured.")] = 4,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 1024,
) -> None:
    """Measure, and write the page."""
    named, ids = of_text(model, text, 2 * windows, window, gguf_file)
    named.set_attn_implementation("adaattn")
    config = named.config
    layers = config.num_hidden_layers
    alone = losses(named, ids[::2], {"none": (), **{str(layer): (layer,) for layer in range(layers)}})
    rank = sorted(range(layers), key=lambda layer: alone[str(layer)]["kl"])
    counts = [round(share * layers) for share in SHARES]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    mixed = losses(named, ids[1::2], {str(count): frozenset(rank[:count]) for count in counts})
    rows = [
        {"layers": count, "bytes": (2 * dim + 2 - dim / 2 * count / layers) / (4 * dim), **mixed[str(count)]}
        for count in counts
    ]
    found = {
        "provenance": provenance(torch.device("cpu")), "of": f"{model.name} in float32 on {text.name}",
        "alone": alone, "mixed": rows, "layers": layers, "windows": windows, "window": window,
    }  # fmt: skip
    write_atomically(write / "cache_layers.json", json.dumps(found, indent=1, sort_keys=True) + "\n")
    write_atomically(write / "cache_layers.md", page(found))


if __name__ == "__main__":
    app()
