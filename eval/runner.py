"""One evaluation from end to end: windows, arms, journal, report."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaattn_hf.backends.select import BackendRefusal
from adaattn_hf.eval import activation, cost, scoring, summary, tasks
from adaattn_hf.eval.checkpoint import Checkpoint, arms
from adaattn_hf.eval.corpora import Corpus
from adaattn_hf.eval.errors import ModelUnavailable
from adaattn_hf.eval.journal import NAME as JOURNAL
from adaattn_hf.eval.journal import BatchRecord, Journal, Memory
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.settings import Settings
from adaattn_hf.eval.windows import Window
from adaattn_hf.files import write_atomically
from adaattn_hf.plan import PlanError

FORMAT = 1
REPORT = "report.json"
Collate = Callable[[Sequence[Window]], scoring.Batch]
Progress = Callable[[int, int], None]
"""Called with (scored tokens done, scored tokens in all) at the start and after each batch."""


def _quiet(done: int, total: int) -> None:
    """No progress display."""


@dataclass(frozen=True)
class Measured:
    """A finished run before it becomes a report.

    Attributes:
        task: what was scored.
        roles: (role, implementation) of each arm, stock first.
        tokens: scores of every token.
        quality: the report's part of that name.
        records: every batch, in order.
        planned: whether each arm carries a plan that may approximate.
        memory: peak memory per arm.
        fingerprint: what was measured.
    """

    task: tasks.Task
    roles: tuple[tuple[str, str], ...]
    tokens: summary.Tokens
    quality: dict[str, Any]
    records: tuple[BatchRecord, ...]
    planned: tuple[bool, ...]
    memory: list[dict[str, Any]]
    fingerprint: dict[str, Any]


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
    """Run all arms over a corpus; see `evaluate` for the arguments."""
    corpus = corpus.head(settings.limit_docs)
    task = tasks.build(checkpoint, corpus, settings)
    batches = scoring.plan_batches(task.windows, settings.batch_size, settings.padding)
    roles: tuple[tuple[str, str], ...] = (("stock", settings.against), ("tested", settings.impl))
    roles += (("anchor", settings.anchor),) if settings.anchor else ()
    models = arms(checkpoint, settings.implementations)
    planned = tuple(activation.has_plan(m, name) for m, (_, name) in zip(models, roles, strict=True))
    fingerprint = _fingerprint(checkpoint, corpus, settings, task)
    if output is not None and overwrite:
        (output / JOURNAL).unlink(missing_ok=True)
    journal: AbstractContextManager[Journal | Memory] = (
        Memory() if output is None else Journal(output, fingerprint, resume=resume)
    )
    collate = partial(
        scoring.collate, device=checkpoint.device, padding=settings.padding, pad_token=checkpoint.pad_token()
    )
    with journal as records:
        memory = _memory(models, task, batches, collate, checkpoint.device)
        _run(models, planned, task, batches, collate, records, checkpoint.device, progress)
        kept = tuple(records.records[i] for i in range(len(batches)))
    tokens = summary.gather(task, batches, kept)
    quality = summary.quality(task, tokens, roles, corpus.kind)
    return Measured(task, roles, tokens, quality, kept, planned, memory, fingerprint)


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

    Args:
        checkpoint: model and tokenizer.
        corpus: the text.
        settings: the rest.
        output: directory for the journal and `report.json`; without it nothing is written.
        resume: go on with the journal that is there.
        overwrite: begin again where a journal is there.
        progress: told how far the run is.

    Returns:
        The report (JSON values; see `adaattn_hf.eval.report` for tables of it).

    Raises:
        UsageError, DataUnavailable, ModelUnavailable, JournalMismatch: as their names say.
        KeyboardInterrupt: passed on; finished batches are in the journal.
    """
    done = measure(
        checkpoint, corpus, settings, output=output, resume=resume, overwrite=overwrite, progress=progress
    )
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
        "quality": done.quality,
        "activation": _per_arm(done.roles, [a.as_dict() for a in activations]),
        "cost": {
            "speed": _per_arm(done.roles, summary.speed(done.records, read)),
            "memory": _per_arm(done.roles, done.memory),
        },
        "provenance": provenance(checkpoint.device),
    }
    if output is not None:
        write_json(output / REPORT, report)
    return report


def _per_arm(roles: Sequence[tuple[str, str]], entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": role, "implementation": name, **e} for (role, name), e in zip(roles, entries, strict=True)
    ]


def _run(
    models: Sequence[Any],
    planned: Sequence[bool],
    task: tasks.Task,
    batches: Sequence[Sequence[int]],
    collate: Collate,
    records: Journal | Memory,
    device: torch.device,
    progress: Progress,
) -> None:
    """Run every batch that is not yet recorded through all arms, and record it."""
    sizes = [sum(len(task.windows[w].targets) for w in batch) for batch in batches]
    done, total = sum(sizes[i] for i in records.records), sum(sizes)
    progress(done, total)
    for index, batch in enumerate(batches):
        if index in records.records:
            continue
        windows = [task.windows[w] for w in batch]
        inputs = collate(windows)
        logits: list[Any] = [None] * len(models)
        elapsed: list[Any] = [None] * len(models)
        for arm in cost.turn(len(models), index):
            logits[arm], elapsed[arm] = cost.timed(partial(scoring.forward, models[arm], inputs), device)
        watched = [plan and activation.is_watched(index, len(batches)) for plan in planned]
        counts = tuple(
            activation.watch(model, partial(scoring.forward, model, inputs)) if watch else None
            for model, watch in zip(models, watched, strict=True)
        )
        records.append(
            index, BatchRecord(scoring.score(logits, windows, inputs.offsets), tuple(elapsed), counts)
        )
        done += sizes[index]
        progress(done, total)


def _memory(
    models: Sequence[Any],
    task: tasks.Task,
    batches: Sequence[Sequence[int]],
    collate: Collate,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Peak bytes of each arm on the largest batch; these runs are also the arms' warm-up.

    Raises:
        ModelUnavailable: an arm refuses the call.
    """
    largest = max(batches, key=lambda b: len(b) * max(len(task.windows[w].input_ids) for w in b))
    inputs = collate([task.windows[w] for w in largest])
    entries = []
    for model in models:
        try:
            peak, how = cost.peak_bytes(partial(scoring.forward, model, inputs), device)
        except (BackendRefusal, PlanError) as error:
            raise ModelUnavailable(f"attention implementation: {error}") from error
        shape = list(inputs.keywords["input_ids"].shape)
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


def _fingerprint(
    checkpoint: Checkpoint, corpus: Corpus, settings: Settings, task: tasks.Task
) -> dict[str, Any]:
    """What must be the same for two runs' batches to be mixed."""
    windows = hashlib.sha256()
    for window in task.windows:
        for part in (window.input_ids, window.positions, window.targets):
            windows.update(np.asarray(part, "<i8").tobytes())
    return {
        "model": checkpoint.name,
        "weights": checkpoint.fingerprint(),
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
    write_atomically(path, json.dumps(_finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
