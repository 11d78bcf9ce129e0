"""What the card of a demo model says: nll by position, the cost of less attention, how the heads differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .architectures import Recipe
from .loop import IGNORED, validation_batches

POSITION_EDGES = (1, 32, 64, 128, 256, 512, 1024)
PART = 8
"""Windows per forward pass."""


def window_mask(length: int, window: int, *, causal: bool, device: torch.device | str = "cpu") -> Tensor:
    """Mask `[1, 1, length, length]`, True = attend: keys nearer than `window`; if causal, none later."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    visible = (distance < window) & (distance > (-1 if causal else -window))
    return visible[None, None]


@torch.no_grad()
def token_nll(
    model: PreTrainedModel, batch: dict[str, Tensor], *, causal: bool, attention_mask: Tensor | None = None
) -> Tensor:
    """Nll `[batch, length]` in nats of every labelled token at its place; NaN where nothing is predicted."""
    logits = model(input_ids=batch["input_ids"], attention_mask=attention_mask).logits.float()
    labels = batch["labels"]
    nll = torch.full(labels.shape, torch.nan, device=labels.device)
    if causal:
        nll[:, 1:] = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
        return nll
    every = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORED)
    return torch.where(labels == IGNORED, torch.nan, every)


def nll_map(
    model: PreTrainedModel,
    stream: Tensor,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    *,
    window: int | None = None,
    limit: int | None = None,
) -> Tensor:
    """Nll `[windows, context]` of a stream's disjoint windows, by position in the window.

    Args:
        model: In eval mode.
        stream: Token ids `[tokens]`.
        recipe: Of the model.
        tokenizer: Of the model.
        window: Attend to this many nearest keys only, on each side where the model looks ahead; None = all.
        limit: Use at most this many windows.
    """
    causal = recipe.objective == "causal"
    mask = (
        None if window is None else window_mask(recipe.context, window, causal=causal, device=stream.device)
    )
    rows: list[Tensor] = []
    for batch in validation_batches(stream, recipe, tokenizer):
        for first in range(0, len(batch["labels"]), PART):
            part = {name: value[first : first + PART] for name, value in batch.items()}
            rows.append(token_nll(model, part, causal=causal, attention_mask=mask))
            if limit is not None and len(rows) * PART >= limit:
                return torch.cat(rows)[:limit]
    return torch.cat(rows)


def nll_by_position(nll: Tensor) -> dict[str, float]:
    """Mean nll of the columns of `[windows, context]` between successive `POSITION_EDGES`."""
    edges = [edge for edge in POSITION_EDGES if edge <= nll.shape[1]]
    return {f"{low}-{high - 1}": float(nll[:, low:high].nanmean()) for low, high in pairwise(edges)}


@torch.no_grad()
def head_entropies(
    model: PreTrainedModel, stream: Tensor, recipe: Recipe, windows: int = 8
) -> list[list[float]]:
    """Mean entropy of attention rows in nats, by layer and query head, over the first windows of a stream."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the stock implementation that returns its weights
    windows = min(windows, len(stream) // recipe.context)
    inputs = stream[: windows * recipe.context].view(windows, recipe.context)
    total = torch.zeros(1, device=stream.device)
    for row in inputs:
        weights = torch.stack(model(input_ids=row[None], output_attentions=True).attentions)
        total = total + torch.special.entr(weights.float()).sum(-1).mean((1, 3)) / windows
    model.set_attn_implementation(before)
    return [[float(value) for value in layer] for layer in total]


def even_sample(stream: Tensor, tokens: int, recipe: Recipe) -> Tensor:
    """About `tokens` ids of a stream `[tokens]`: runs of one context, evenly spaced."""
    runs = stream[: len(stream) // recipe.context * recipe.context].view(-1, recipe.context)
    wanted = min(len(runs), max(1, tokens // recipe.context))
    return runs[torch.arange(wanted, device=stream.device) * len(runs) // wanted].flatten()


def measure(
    model: PreTrainedModel, streams: dict[str, Tensor], recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> dict[str, object]:
    """All the measured figures of a card.

    Args:
        model: The weights as they are shipped.
        streams: Split -> token ids; of `train`, as much as `heldout` has is measured, evenly chosen.
        recipe: Of the model.
        tokenizer: Of the model.
    """
    model.train(False)
    heldout = streams["heldout"]
    full = nll_map(model, heldout, recipe, tokenizer)
    windows: Sequence[int] = (1, 8, 32, 128)
    figures: dict[str, object] = {
        "nll": {
            "train": float(
                nll_map(
                    model, even_sample(streams["train"], len(heldout), recipe), recipe, tokenizer
                ).nanmean()
            ),
            "validation": float(nll_map(model, streams["validation"], recipe, tokenizer).nanmean()),
            "heldout": float(full.nanmean()),
        },
        "heldout_nll_by_position": nll_by_position(full),
        "heldout_nll_by_attention_window": {
            **{
                str(w): float(nll_map(model, heldout, recipe, tokenizer, window=w).nanmean()) for w in windows
            },
            "all": float(full.nanmean()),
        },
        "head_entropy_nats": head_entropies(model, heldout, recipe),
    }
    return figures
