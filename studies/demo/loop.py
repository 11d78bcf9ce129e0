"""The training loop of the demo models: deterministic by step, resumable, keeps the best checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .architectures import Recipe

MASK_RATE = 0.15
IGNORED = -100


@dataclass(frozen=True)
class Streams:
    """Token ids of the training and the validation split, each one row `[tokens]` on the device."""

    train: Tensor
    validation: Tensor


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: Optimizer steps done.
        best: Lowest validation nll so far, nats/token.
        best_step: When it was reached.
        history: Rows of step, training nll and validation nll.
        seconds: Wall time of the steps so far.
    """

    step: int = 0
    best: float = math.inf
    best_step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


def mask_tokens(
    ids: Tensor, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator
) -> dict[str, Tensor]:
    """BERT's corruption of `ids` `[batch, length]`: 15 % are predicted; 80 % of these masked, 10 % random.

    Source: Devlin et al. 2019, section 3.1. Special tokens are never chosen.
    """
    device = ids.device
    special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=device))
    draw = torch.rand(ids.shape, generator=generator, device=device)
    how = torch.rand(ids.shape, generator=generator, device=device)
    other = torch.randint(len(tokenizer), ids.shape, generator=generator, device=device)
    chosen = (draw < MASK_RATE) & ~special
    corrupted = torch.where(chosen & (how < 0.8), tokenizer.mask_token_id, ids)
    corrupted = torch.where(chosen & (how >= 0.9), other, corrupted)
    return {"input_ids": corrupted, "labels": torch.where(chosen, ids, IGNORED)}


def _example(
    windows: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator
) -> dict[str, Tensor]:
    """Inputs and labels of windows `[batch, context]` (masked: two tokens shorter, to be framed)."""
    if recipe.objective == "causal":
        return {"input_ids": windows, "labels": windows}
    frame = windows.new_ones(len(windows), 1)
    framed = torch.cat([frame * tokenizer.cls_token_id, windows, frame * tokenizer.sep_token_id], dim=1)
    return mask_tokens(framed, tokenizer, generator)


def _span(recipe: Recipe) -> int:
    return recipe.context if recipe.objective == "causal" else recipe.context - 2


def _generator(recipe: Recipe, step: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(recipe.seed * 1_000_003 + step)


def training_batch(
    stream: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, step: int
) -> dict[str, Tensor]:
    """The batch of one step: windows at random places, the same for a step however it is reached."""
    generator = _generator(recipe, step, stream.device)
    span, rows = _span(recipe), recipe.batch_size
    if step < recipe.short_steps:
        span -= recipe.context - recipe.short_context
        rows = recipe.batch_size * recipe.context // recipe.short_context
    starts = torch.randint(len(stream) - span + 1, (rows, 1), generator=generator, device=stream.device)
    windows = stream[starts + torch.arange(span, device=stream.device)]
    if recipe.objective == "causal":
        windows[::2, 0] = (
            tokenizer.bos_token_id
        )  # a text may begin with the first token or in the middle of things
    return _example(windows, recipe, tokenizer, generator)


def validation_batches(
    stream: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> Iterator[dict[str, Tensor]]:
    """Disjoint windows over the whole stream, with masks that are the same every time."""
    span = _span(recipe)
    windows = stream[: len(stream) // span * span].view(-1, span)
    for index, rows in enumerate(torch.split(windows, 4 * recipe.batch_size)):
        yield _example(rows, recipe, tokenizer, _generator(recipe, -1 - index, stream.device))


def autocast(device: torch.device) -> AbstractContextManager[None]:
    """bf16 autocast on CUDA, nothing elsewhere."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


@torch.no_grad()
def stream_nll(
    model: PreTrainedModel, stream: Tensor, recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> float:
    """Mean nll of a stream in nats per predicted token, over disjoint windows."""
    model.train(False)
    total, count = 0.0, 0
    for batch in validation_batches(stream, recipe, tokenizer):
        with autocast(stream.device):
            loss = model(**batch).loss
        labels = batch["labels"][:, 1:] if recipe.objective == "causal" else batch["labels"]
        tokens = int((labels != IGNORED).sum())
        total += float(loss) * tokens
        count += tokens
    return total / count


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak at the last step."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=fused)


def save_state(path: Path, state: object) -> None:
    """torch.save, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    streams: Streams,
    recipe: Recipe,
    work: Path,
    *,
    stop_after: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Train until `recipe.steps`, going on from the state in `work` when there is one.

    The weights with the lowest validation nll lie in `work/best.pt` when this returns.

    Args:
        model: Fresh weights, on the device of the streams; trained in place.
        tokenizer: Its special tokens frame and mask windows for the masked objective.
        streams: Training and validation tokens.
        recipe: How to train.
        work: Directory of the resumable state.
        stop_after: Return after this step as an interruption would leave it.
        on_progress: Called after every step.

    Raises:
        ValueError: `work` holds the state of another recipe, or a split is shorter than one window.
    """
    for split, stream in (("training", streams.train), ("validation", streams.validation)):
        if len(stream) < recipe.context:
            raise ValueError(
                f"the {split} split has {len(stream)} tokens, expected at least {recipe.context}: add text"
            )
    optimizer = _optimizer(model, recipe)
    progress = Progress()
    state_path = work / "state.pt"
    if state_path.exists():
        state = torch.load(state_path, map_location=streams.train.device, weights_only=True)
        if state["recipe"] != asdict(recipe):
            raise ValueError(
                f"{state_path} belongs to another recipe ({state['recipe']}), expected {asdict(recipe)}: "
                "name an empty output directory"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(**state["progress"])
    last = recipe.steps if stop_after is None else min(stop_after, recipe.steps)
    running = torch.zeros((), device=streams.train.device)
    since, begun = 0, time.perf_counter() - progress.seconds
    while progress.step < last:
        model.train()
        torch.manual_seed(recipe.seed + progress.step)  # dropout: the same for a step however it is reached
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, progress.step)
        batch = training_batch(streams.train, recipe, tokenizer, progress.step)
        with autocast(streams.train.device):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.detach()
        since += 1
        progress.step += 1
        progress.seconds = time.perf_counter() - begun
        if progress.step % recipe.evaluate_every == 0 or progress.step == last:
            validation = stream_nll(model, streams.validation, recipe, tokenizer)
            row = {"step": progress.step, "train_nll": float(running) / since, "validation_nll": validation}
            progress.history.append(row)
            running.zero_()
            since = 0
            if validation < progress.best:
                progress.best, progress.best_step = validation, progress.step
                save_state(work / "best.pt", model.state_dict())
            save_state(
                state_path,
                {
                    "recipe": asdict(recipe),
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "progress": asdict(progress),
                },
            )
        if on_progress is not None:
            on_progress(progress)
    return progress
