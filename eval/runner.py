"""One evaluation from end to end: windows, arms, journal, report.

Windows become batches, batches run through every arm, and logits become numbers per scored token.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.backends.select import BackendRefusal
from adaattn_hf.errors import ModelUnavailable, UsageError
from adaattn_hf.patches.cache.caches import AdaAttnCache, check_stored
from adaattn_hf.patches.checkpoint import Checkpoint, with_attention
from adaattn_hf.patches.models.cache_keyword import with_cache
from adaattn_hf.patches.observe.monitoring import monitoring, statistics
from adaattn_hf.patches.plans.attach import plan_of
from adaattn_hf.patches.plans.hashes import weight_hash
from adaattn_hf.plans.plan import PlanError
from adaattn_hf.stats.paired import TokenScores, joined, score_tokens
from adaattn_hf.stats.stopwatch import timed

from . import summary, tasks, team, timing
from .corpora import Corpus
from .journal import BatchRecord, Counts, Journal
from .progress import silent
from .provenance import provenance
from .settings import Settings
from .windows import TokenWindow

_ROWS = 64
"""Rows of logits that are taken to float64 at a time: 64 x 50k x 8 bytes = 26 MB per arm."""
_CHUNK_BATCHES = 16
WATCHED_BATCHES = 32
"""Most batches, spread evenly over a run, on which it is counted what is not exact, in passes that are not timed."""
FORMAT = 1
REPORT = "report.json"
Keywords = dict[str, torch.Tensor]
"""A model's keywords for a batch."""
Batch = tuple[Keywords, tuple[int, ...]]
"""Its keywords, and the columns of padding before each window `[batch]`."""


def plan_batches(windows: Sequence[TokenWindow], batch_size: int, padding: str = "none") -> list[list[int]]:
    """Indices of the windows of each batch.

    Without padding a batch holds windows of one length, gathered from a stretch of the text, so that nothing is masked
    and documents are still finished in order. With padding a batch is the next `batch_size` windows, as they come. The
    plan depends on the windows and these settings alone, never on where a run was interrupted.
    """
    if padding != "none":
        return [list(range(i, min(i + batch_size, len(windows)))) for i in range(0, len(windows), batch_size)]
    chunk = batch_size * _CHUNK_BATCHES
    batches = []
    for begin in range(0, len(windows), chunk):
        order = sorted(range(begin, min(begin + chunk, len(windows))), key=lambda i: (-len(windows[i].input_ids), i))
        for _, same in groupby(order, key=lambda i: len(windows[i].input_ids)):
            indices = list(same)
            batches += [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    return batches


def collate(windows: Sequence[TokenWindow], device: torch.device, padding: str = "none", pad_token: int = 0) -> Batch:
    """The inputs of a batch. Windows of one length are stacked; others need `padding` `left` or `right`."""
    lengths = [len(w.input_ids) for w in windows]
    longest = max(lengths)
    if padding == "none":
        stacked = torch.from_numpy(np.stack([w.input_ids for w in windows]))
        return {"input_ids": stacked.to(device)}, (0,) * len(windows)
    offsets = tuple(longest - n if padding == "left" else 0 for n in lengths)
    input_ids = torch.full((len(windows), longest), pad_token, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(input_ids)
    for row, (window, offset, length) in enumerate(zip(windows, offsets, lengths, strict=True)):
        input_ids[row, offset : offset + length] = torch.from_numpy(window.input_ids)
        mask[row, offset : offset + length] = 1
    keywords = {"input_ids": input_ids, "attention_mask": mask}
    if padding == "left":
        keywords["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    return {name: value.to(device) for name, value in keywords.items()}, offsets


def forward(
    model: Any, keywords: Keywords, cache: str | None = None, piece: int = 64, streaming: bool = False
) -> torch.Tensor:
    """Logits `[batch, length, vocab]` without gradients.

    A `cache` names what it stores, `dynamic` Transformers' own: unpadded tokens are read in pieces over it. With
    `streaming`, heads with a window keep it alone in the cache.
    """
    with torch.inference_mode():
        if cache is None:
            more: dict[str, Any] = {"use_cache": False} if model.can_generate() else {}
            return model(**keywords, **more).logits  # type: ignore[no-any-return]
        stock = cache == "dynamic"
        keys: Any = DynamicCache(config=model.config) if stock else AdaAttnCache(model, cache, streaming=streaming)
        cached = with_cache(model, keys)
        parts = keywords["input_ids"].split(piece, dim=1)
        return torch.cat([model(part, use_cache=True, **cached).logits for part in parts], dim=1)


def score(logits: Sequence[torch.Tensor], windows: Sequence[TokenWindow], offsets: Sequence[int]) -> TokenScores:
    """Scores of one batch, a few rows at a time. `logits` holds `[batch, length, vocab]` for each arm, stock first."""
    rows = [np.full(len(w.targets), i) for i, w in enumerate(windows)]
    columns = [w.rows + o for w, o in zip(windows, offsets, strict=True)]
    places = (rows, columns, [w.targets for w in windows])
    row, column, targets = (torch.from_numpy(np.concatenate(one)).to(logits[0].device) for one in places)
    parts = zip(row.split(_ROWS), column.split(_ROWS), targets.split(_ROWS), strict=True)
    return joined([score_tokens([arm[r, c] for arm in logits], t) for r, c, t in parts])


def is_watched(batch: int, batches: int) -> bool:
    """Whether a batch is one of those on which it is counted what is not exact."""
    return batch % max(1, -(-batches // WATCHED_BATCHES)) == 0


def watch(model: Any, call: Callable[[], object]) -> Counts:
    """The pairs of one forward pass of a model that carries a plan."""
    with monitoring(model, sample_rows=False):
        call()
    layers = statistics(model)
    return sum(layer["pairs"] for layer in layers), sum(layer["changed"] for layer in layers)


class Arm(NamedTuple):
    """One model under test: its role in the report, its cache, and its plan's entry in the report, if any."""

    role: str
    implementation: str
    model: Any
    cache: str | None
    plan: dict[str, Any] | None


class Measured(NamedTuple):
    """A finished run: its report, the scores of all tokens in the order of the windows, and the document of each."""

    report: dict[str, Any]
    scores: TokenScores
    document: summary.Numbers
    records: tuple[BatchRecord, ...]


Run = tuple[str, Checkpoint, Corpus, Settings, str]
"""One evaluation of several that a command makes, behind its label for the eye; last the name of its directory."""


def measure(
    checkpoint: Checkpoint,
    corpus: Corpus,
    settings: Settings,
    *,
    output: Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], object] = silent,
) -> Measured:
    """Measure an attention implementation against stock, on the same tokens in the same batches.

    An output directory gets the journal, which `resume` goes on with, and `report.json`.
    `progress` is told of the scored tokens that are done and of all, at the start and after each batch.
    KeyboardInterrupt is passed on: finished batches are in the journal.
    """
    if settings.cache is not None and checkpoint.objective != "causal":
        raise UsageError(
            f"cache: got {settings.cache!r} for {checkpoint.name}, which keeps no keys and values; leave --cache out"
        )
    corpus = corpus.head(settings.limit_docs)
    task = tasks.build(checkpoint, corpus, settings)
    windows, arms, device = task.windows, _arms(checkpoint, settings, task.context), checkpoint.device
    about = _about(checkpoint, corpus, settings, task, arms)
    batches = plan_batches(windows, settings.batch_size, settings.padding)
    sizes = [sum(len(windows[w].targets) for w in batch) for batch in batches]

    def inputs_of(batch: Sequence[int]) -> Batch:
        return collate([windows[w] for w in batch], device, settings.padding, checkpoint.pad_token())

    def logits_of(arm: Arm, keywords: Keywords, streaming: bool) -> Callable[[], torch.Tensor]:
        return lambda: forward(arm.model, keywords, arm.cache, settings.cache_piece, streaming)

    def record(index: int) -> BatchRecord:
        """Runs all arms in turn on one batch."""
        keywords, offsets = inputs_of(batches[index])
        logits, elapsed = [list[Any]([None]) * len(arms) for _ in range(2)]
        for at in timing.turn(len(arms), index):
            logits[at], elapsed[at] = timed(logits_of(arms[at], keywords, settings.streaming), device)
        watched = is_watched(index, len(batches))
        counts = tuple(
            watch(arm.model, logits_of(arm, keywords, False)) if arm.plan and watched else None for arm in arms
        )
        return BatchRecord(score(logits, [windows[w] for w in batches[index]], offsets), tuple(elapsed), counts)

    def peak(arm: Arm, keywords: Keywords) -> dict[str, Any]:
        """Peak bytes of an arm on a batch, which warms it up; ModelUnavailable if it refuses the call."""
        try:
            most, how = timing.peak_bytes(logits_of(arm, keywords, settings.streaming), device)
        except (BackendRefusal, PlanError) as error:
            raise ModelUnavailable(f"attention implementation: {error}") from error
        return {"peak_bytes": most, "counted": how, "batch_shape": list(keywords["input_ids"].shape)}

    group = team.present()
    fingerprint = _fingerprint(about, settings, windows, device)
    with Journal(output if group.is_main else None, fingerprint, resume=resume) as journal:
        largest, _ = inputs_of(
            max(batches, key=lambda batch: len(batch) * max(len(windows[w].input_ids) for w in batch))
        )
        memory = [peak(arm, largest) for arm in arms]
        journal.records = group.broadcast(journal.records)
        done = sum(sizes[index] for index in journal.records)
        progress(done, sum(sizes))
        # of several processes each runs every n-th batch, all know every record
        missing = [index for index in range(len(batches)) if index not in journal.records]
        for index, batch_record in zip(missing, group.work(missing, record), strict=True):
            journal.append(index, batch_record)
            done += sizes[index]
            progress(done, sum(sizes))
        records = tuple(journal.records[index] for index in range(len(batches)))
    scores, of_window = summary.gather(windows, batches, records)
    of_document = np.asarray([windows[w].document for w in of_window], dtype=np.int64)
    roles = [(arm.role, arm.implementation) for arm in arms]

    def per_arm(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": role, "implementation": name, **e} for (role, name), e in zip(roles, entries, strict=True)]

    report = {
        **about,
        "quality": summary.quality(task, scores, of_window, of_document, roles, corpus.kind),
        "activation": per_arm(
            [
                summary.activation(arm.implementation, arm.plan is not None, [one.activation[i] for one in records])
                for i, arm in enumerate(arms)
            ]
        ),
        "cost": {
            "speed": per_arm(summary.speed(records, sum(len(w.input_ids) for w in windows))),
            "memory": per_arm(memory),
        },
        "provenance": provenance(device),
    }
    if output is not None and group.is_main:
        write_json(output / REPORT, report)
    return Measured(report, scores, of_document, records)


def _about(
    checkpoint: Checkpoint, corpus: Corpus, settings: Settings, task: tasks.Task, arms: Sequence[Arm]
) -> dict[str, Any]:
    """The part of a report that is known before anything is measured."""
    return {
        "format": FORMAT,
        "model": {
            "name": checkpoint.name,
            "type": checkpoint.model.config.model_type,
            "objective": checkpoint.objective,
            "parameters": sum(p.numel() for p in checkpoint.model.parameters()),
            "dtype": checkpoint.dtype,
            "weights_sha256": weight_hash(checkpoint.model),
        },
        "data": {
            "name": corpus.name,
            "kind": corpus.kind,
            "origin": corpus.origin,
            "documents": len({w.document for w in task.windows}),
            "sha256": corpus.sha256,
        },
        "settings": {**asdict(settings), "context": task.context},
        "protocol": task.protocol,
        "plans": [arm.plan and {"role": arm.role, **arm.plan} for arm in arms],
    }


def _fingerprint(
    about: Any, settings: Settings, windows: Sequence[TokenWindow], device: torch.device
) -> dict[str, Any]:
    """What a journal's batches may be mixed by: all that their numbers depend on."""
    digest, model = hashlib.sha256(), about["model"]
    for window in windows:
        for part in (window.input_ids, window.rows, window.targets):
            digest.update(np.asarray(part, "<i8").tobytes())
    return {
        "model": model["name"],
        "weights": model["weights_sha256"],
        "dtype": model["dtype"],
        "device": device.type,
        "data": about["data"]["sha256"],
        "windows": digest.hexdigest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{f"settings.{key}": value for key, value in asdict(settings).items()},
        "plans": [plan and plan["sha256"] for plan in about["plans"]],
    }


def evaluate(checkpoint: Checkpoint, corpus: Corpus, settings: Settings, **how: Any) -> dict[str, Any]:
    """Returns the report of `measure` (JSON values; see `adaattn_hf.eval.report` for tables of it)."""
    return measure(checkpoint, corpus, settings, **how).report


def _arms(checkpoint: Checkpoint, settings: Settings, context: int) -> list[Arm]:
    arms = []
    for role, name, path, cache in settings.arms:
        model = with_attention(checkpoint, name, path)
        entry, plan = None, plan_of(model) if name.startswith("adaattn") else None
        if role == "tested" and cache is not None:
            try:
                check_stored(model, cache, settings.streaming)
            except ValueError as error:
                raise UsageError(str(error)) from error
            limit = 0 if plan is None else plan.max_length
            if settings.streaming and context > limit:
                raise UsageError(
                    f"streaming: got windows of {context} tokens and a plan that speaks for {limit}, expected "
                    f"--context {limit} or less"
                )
        if plan is not None:
            digest = hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()
            entry = {"path": path or "in the model's configuration", "sha256": digest, "budget": plan.budget}
        arms.append(Arm(role, name, model, cache, entry))
    return arms


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, which has no infinity: null for what is too large (an untrained model's word perplexity)."""
    write_atomically(path, json_text(value, indent=2, ensure_ascii=False) + "\n")
