"""One evaluation from end to end: windows, arms, journal, report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.backends.select import BackendRefusal
from adaattn_hf.calibration import team
from adaattn_hf.errors import ModelUnavailable, UsageError
from adaattn_hf.patches.cache.caches import check_stored
from adaattn_hf.patches.checkpoint import Checkpoint, arms
from adaattn_hf.patches.plans.attach import plan_of
from adaattn_hf.patches.plans.hashes import weight_hash
from adaattn_hf.plans.plan import PlanError
from adaattn_hf.stats.stopwatch import timed

from . import activation, scoring, summary, tasks, timing
from .corpora import Corpus
from .journal import NAME as JOURNAL
from .journal import BatchRecord, Journal
from .provenance import provenance
from .settings import Settings
from .windows import Window

FORMAT = 1
REPORT = "report.json"
Collate = Callable[[Sequence[Window]], scoring.Batch]
Forward = Callable[..., torch.Tensor]
"""An arm: inputs to logits, with the keywords of `scoring.forward`."""
Progress = Callable[[int, int], None]
"""Called with (scored tokens done, scored tokens in all) at the start and after each batch."""


def _quiet(done: int, total: int) -> None:
    """No progress display."""


@dataclass(frozen=True)
class Measured:
    """A finished run before it becomes a report."""

    task: tasks.Task
    roles: tuple[tuple[str, str], ...]
    plans: tuple[dict[str, Any] | None, ...]
    tokens: summary.Tokens
    quality: dict[str, Any]
    records: tuple[BatchRecord, ...]
    planned: tuple[bool, ...]
    memory: list[dict[str, Any]]
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class _Work:
    """What every batch is put through."""

    models: Sequence[Any]
    calls: Sequence[Forward]
    planned: tuple[bool, ...]
    task: tasks.Task
    batches: Sequence[Sequence[int]]
    collate: Collate
    device: torch.device


class Run(NamedTuple):
    """One evaluation of several that a command makes, with its label for the eye and the name of its directory."""

    label: str
    checkpoint: Checkpoint
    corpus: Corpus
    settings: Settings
    name: str


def measure(
    checkpoint: Checkpoint,
    corpus: Corpus,
    settings: Settings,
    *,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = _quiet,
) -> Measured:
    """Run all arms over a corpus, as `evaluate` does."""
    if settings.cache is not None and checkpoint.objective != "causal":
        raise UsageError(
            f"cache: got {settings.cache!r} for {checkpoint.name}, which keeps no keys and values; leave --cache out"
        )
    corpus = corpus.head(settings.limit_docs)
    task = tasks.build(checkpoint, corpus, settings)
    batches = scoring.plan_batches(task.windows, settings.batch_size, settings.padding)
    reference = "stock" if settings.baseline_plan is None else "reference"
    roles: tuple[tuple[str, str], ...] = ((reference, settings.baseline), ("tested", settings.attn_implementation))
    roles += (("anchor", settings.anchor),) if settings.anchor else ()
    models = arms(checkpoint, settings.implementations, settings.plans)
    plans = tuple(_plan_entry(m, path) for m, path in zip(models, settings.plans, strict=True))
    calls = [
        partial(scoring.forward, model, cache=cache, piece=settings.cache_piece, streaming=settings.streaming)
        for model, cache in zip(models, settings.caches, strict=True)
    ]
    if settings.cache is not None:
        try:
            check_stored(models[1], settings.cache, settings.streaming)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if settings.streaming:
        plan = plan_of(models[1])
        limit = 0 if plan is None else plan.max_length
        if task.context > limit:
            raise UsageError(
                f"streaming: got windows of {task.context} tokens and a plan that speaks for {limit}, expected "
                f"--context {limit} or less"
            )
    planned = tuple(activation.has_plan(m, name) for m, (_, name) in zip(models, roles, strict=True))
    fingerprint = _fingerprint(checkpoint, corpus, settings, task)
    fingerprint["plans"] = [plan and plan["sha256"] for plan in plans]
    crew = team.present()
    if output is not None and overwrite and crew.leads:
        (output / JOURNAL).unlink(missing_ok=True)
    collate = partial(
        scoring.collate, device=checkpoint.device, padding=settings.padding, pad_token=checkpoint.pad_token()
    )
    work = _Work(models, calls, planned, task, batches, collate, checkpoint.device)
    with Journal(output if crew.leads else None, fingerprint, resume=resume) as records:
        memory = _memory(work)
        records.records = crew.tell(records.records)
        _run(work, records, progress, crew)
        kept = tuple(records.records[i] for i in range(len(batches)))
    tokens = summary.gather(task, batches, kept)
    quality = summary.quality(task, tokens, roles, corpus.kind)
    return Measured(task, roles, plans, tokens, quality, kept, planned, memory, fingerprint)


def evaluate(
    checkpoint: Checkpoint,
    corpus: Corpus,
    settings: Settings,
    *,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = _quiet,
) -> dict[str, Any]:
    """Measure an attention implementation against stock, on the same tokens in the same batches.

    An output directory gets the journal, which `resume` goes on with and `overwrite` begins again, and `report.json`.

    Returns:
        The report (JSON values; see `adaattn_hf.eval.report` for tables of it).

    Raises:
        UsageError, DataUnavailable, ModelUnavailable, JournalMismatch: as their names say.
        KeyboardInterrupt: passed on; finished batches are in the journal.
    """
    done = measure(checkpoint, corpus, settings, output=output, resume=resume, overwrite=overwrite, progress=progress)
    read = sum(len(w.input_ids) for w in done.task.windows)
    activations = [
        activation.rate(name, done.planned[arm], [record.activation[arm] for record in done.records])
        for arm, (_, name) in enumerate(done.roles)
    ]
    report = {
        "format": FORMAT,
        "model": _model_entry(checkpoint, done.fingerprint["weights"]),
        "data": {
            "name": corpus.name,
            "kind": corpus.kind,
            "origin": corpus.origin,
            "documents": len({w.document for w in done.task.windows}),
            "sha256": done.fingerprint["data"],
        },
        "settings": {**settings.as_dict(), "context": done.task.context},
        "protocol": done.task.protocol,
        "plans": [plan and {"role": role, **plan} for plan, (role, _) in zip(done.plans, done.roles, strict=True)],
        "quality": done.quality,
        "activation": _per_arm(done.roles, activations),
        "cost": {
            "speed": _per_arm(done.roles, summary.speed(done.records, read)),
            "memory": _per_arm(done.roles, done.memory),
        },
        "provenance": provenance(checkpoint.device),
    }
    if output is not None and team.present().leads:
        write_json(output / REPORT, report)
    return report


def _per_arm(roles: Sequence[tuple[str, str]], entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": role, "implementation": name, **e} for (role, name), e in zip(roles, entries, strict=True)]


def _run(work: _Work, records: Journal, progress: Progress, crew: team.Team) -> None:
    """Run every batch that is not yet recorded through all arms, and record it.

    Of several processes each runs every n-th of these batches, and all know every record.
    """
    count = len(work.batches)
    sizes = [sum(len(work.task.windows[w].targets) for w in batch) for batch in work.batches]
    done, total = sum(sizes[i] for i in records.records), sum(sizes)
    progress(done, total)
    missing = [index for index in range(count) if index not in records.records]
    for start in range(0, len(missing), crew.size):
        stop = min(start + crew.size, len(missing))
        share = [_measured(work, missing[place]) for place in crew.mine(stop, start)]
        for index, record in zip(missing[start:stop], crew.gather(share, stop, start), strict=True):
            records.append(index, record)
            done += sizes[index]
        progress(done, total)


def _measured(work: _Work, index: int) -> BatchRecord:
    """One batch through all arms, each first in its turn."""
    windows = [work.task.windows[w] for w in work.batches[index]]
    inputs = work.collate(windows)
    logits: list[Any] = [None] * len(work.calls)
    elapsed: list[Any] = [None] * len(work.calls)
    for arm in timing.turn(len(work.calls), index):
        logits[arm], elapsed[arm] = timed(partial(work.calls[arm], inputs), work.device)
    watched = activation.is_watched(index, len(work.batches))
    counts = tuple(
        activation.watch(model, partial(call, inputs, streaming=False)) if plan and watched else None
        for model, call, plan in zip(work.models, work.calls, work.planned, strict=True)
    )
    return BatchRecord(scoring.score(logits, windows, inputs.offsets), tuple(elapsed), counts)


def _memory(work: _Work) -> list[dict[str, Any]]:
    """Peak bytes of each arm on the largest batch, its warm-up, too; ModelUnavailable if an arm refuses the call."""
    windows = work.task.windows
    largest = max(work.batches, key=lambda b: len(b) * max(len(windows[w].input_ids) for w in b))
    inputs = work.collate([windows[w] for w in largest])
    shape, entries = list(inputs.keywords["input_ids"].shape), []
    for forward in work.calls:
        try:
            peak, how = timing.peak_bytes(partial(forward, inputs), work.device)
        except (BackendRefusal, PlanError) as error:
            raise ModelUnavailable(f"attention implementation: {error}") from error
        entries.append({"peak_bytes": peak, "counted": how, "batch_shape": shape})
    return entries


def _model_entry(checkpoint: Checkpoint, weights: str) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "type": checkpoint.model.config.model_type,
        "objective": checkpoint.objective,
        "parameters": sum(p.numel() for p in checkpoint.model.parameters()),
        "dtype": checkpoint.dtype,
        "weights_sha256": weights,
    }


def _plan_entry(model: Any, path: str | None) -> dict[str, Any] | None:
    """Where an arm's plan came from, and what it is; None for an arm without one."""
    plan = plan_of(model) if model.config._attn_implementation.startswith("adaattn") else None
    if plan is None:
        return None
    digest = hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()
    return {"path": path or "in the model's configuration", "sha256": digest, "budget": plan.budget}


def _fingerprint(checkpoint: Checkpoint, corpus: Corpus, settings: Settings, task: tasks.Task) -> dict[str, Any]:
    """What must be the same for two runs' batches to be mixed."""
    windows = hashlib.sha256()
    for window in task.windows:
        for part in (window.input_ids, window.positions, window.targets):
            windows.update(np.asarray(part, "<i8").tobytes())
    return {
        "model": checkpoint.name,
        "weights": weight_hash(checkpoint.model),
        "dtype": checkpoint.dtype,
        "device": checkpoint.device.type,
        "data": corpus.sha256,
        "windows": windows.hexdigest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{f"settings.{key}": value for key, value in settings.as_dict().items()},
    }


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step: a reader sees the old file or the new one, never half of it.

    JSON has no infinity: what is too large for a float (an untrained model's word perplexity) is written as null.
    """
    write_atomically(path, json_text(value, indent=2, ensure_ascii=False) + "\n")
