"""One evaluation from end to end: windows, arms, journal, report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from adaattn_hf.patches.checkpoint import Checkpoint
from adaattn_hf.patches.checkpoint import arms as copies
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


class Arm(NamedTuple):
    """One model under test: its role in the report, how it is called, and the plan's entry in the report if any."""

    role: str
    implementation: str
    model: Any
    call: Forward
    plan: dict[str, Any] | None


@dataclass(frozen=True)
class _Work:
    arms: Sequence[Arm]
    task: tasks.Task
    batches: Sequence[Sequence[int]]
    collate: Collate
    device: torch.device


class Measured(NamedTuple):
    """A finished run: its report, and what the report sums up."""

    report: dict[str, Any]
    tokens: summary.Tokens
    records: tuple[BatchRecord, ...]


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
    """Measure an attention implementation against stock, on the same tokens in the same batches.

    An output directory gets the journal, which `resume` goes on with and `overwrite` begins again, and `report.json`.
    KeyboardInterrupt is passed on: finished batches are in the journal.
    """
    if settings.cache is not None and checkpoint.objective != "causal":
        raise UsageError(
            f"cache: got {settings.cache!r} for {checkpoint.name}, which keeps no keys and values; leave --cache out"
        )
    corpus = corpus.head(settings.limit_docs)
    task = tasks.build(checkpoint, corpus, settings)
    arms = _arms(checkpoint, settings, task)
    weights, digest = weight_hash(checkpoint.model), corpus.sha256
    fingerprint = {
        "model": checkpoint.name,
        "weights": weights,
        "dtype": checkpoint.dtype,
        "device": checkpoint.device.type,
        "data": digest,
        "windows": _digest(task.windows),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{f"settings.{key}": value for key, value in asdict(settings).items()},
        "plans": [arm.plan and arm.plan["sha256"] for arm in arms],
    }
    crew = team.present()
    if output is not None and overwrite and crew.leads:
        (output / JOURNAL).unlink(missing_ok=True)
    batches = scoring.plan_batches(task.windows, settings.batch_size, settings.padding)
    collate = partial(
        scoring.collate, device=checkpoint.device, padding=settings.padding, pad_token=checkpoint.pad_token()
    )
    work = _Work(arms, task, batches, collate, checkpoint.device)
    with Journal(output if crew.leads else None, fingerprint, resume=resume) as journal:
        memory = _memory(work)
        journal.records = crew.tell(journal.records)
        _run(work, journal, progress, crew)
        records = tuple(journal.records[i] for i in range(len(batches)))
    tokens = summary.gather(task, batches, records)
    roles = [(arm.role, arm.implementation) for arm in arms]

    def per_arm(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": role, "implementation": name, **e} for (role, name), e in zip(roles, entries, strict=True)]

    report = {
        "format": FORMAT,
        "model": {
            "name": checkpoint.name,
            "type": checkpoint.model.config.model_type,
            "objective": checkpoint.objective,
            "parameters": sum(p.numel() for p in checkpoint.model.parameters()),
            "dtype": checkpoint.dtype,
            "weights_sha256": weights,
        },
        "data": {
            "name": corpus.name,
            "kind": corpus.kind,
            "origin": corpus.origin,
            "documents": len({w.document for w in task.windows}),
            "sha256": digest,
        },
        "settings": {**asdict(settings), "context": task.context},
        "protocol": task.protocol,
        "plans": [arm.plan and {"role": arm.role, **arm.plan} for arm in arms],
        "quality": summary.quality(task, tokens, roles, corpus.kind),
        "activation": per_arm(
            [
                activation.rate(arm.implementation, arm.plan is not None, [one.activation[i] for one in records])
                for i, arm in enumerate(arms)
            ]
        ),
        "cost": {
            "speed": per_arm(summary.speed(records, sum(len(w.input_ids) for w in task.windows))),
            "memory": per_arm(memory),
        },
        "provenance": provenance(checkpoint.device),
    }
    if output is not None and crew.leads:
        write_json(output / REPORT, report)
    return Measured(report, tokens, records)


def evaluate(checkpoint: Checkpoint, corpus: Corpus, settings: Settings, **how: Any) -> dict[str, Any]:
    """Returns the report of `measure` (JSON values; see `adaattn_hf.eval.report` for tables of it)."""
    return measure(checkpoint, corpus, settings, **how).report


def _arms(checkpoint: Checkpoint, settings: Settings, task: tasks.Task) -> list[Arm]:
    _, names, plans, _ = zip(*settings.arms, strict=True)
    models = copies(checkpoint, names, plans)
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
    forward = partial(scoring.forward, piece=settings.cache_piece, streaming=settings.streaming)
    return [
        Arm(role, name, model, partial(forward, model, cache=cache), _plan_entry(model, name, plan))
        for model, (role, name, plan, cache) in zip(models, settings.arms, strict=True)
    ]


def _run(work: _Work, records: Journal, progress: Progress, crew: team.Team) -> None:
    """Run every batch that is not yet recorded; of several processes each runs every n-th, all know every record."""
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
    windows = [work.task.windows[w] for w in work.batches[index]]
    inputs = work.collate(windows)
    logits: list[Any] = [None] * len(work.arms)
    elapsed: list[Any] = [None] * len(work.arms)
    for arm in timing.turn(len(work.arms), index):
        logits[arm], elapsed[arm] = timed(partial(work.arms[arm].call, inputs), work.device)
    watched = activation.is_watched(index, len(work.batches))
    counts = tuple(
        activation.watch(arm.model, partial(arm.call, inputs, streaming=False)) if arm.plan and watched else None
        for arm in work.arms
    )
    return BatchRecord(scoring.score(logits, windows, inputs.offsets), tuple(elapsed), counts)


def _memory(work: _Work) -> list[dict[str, Any]]:
    """Peak bytes of each arm on the largest batch, its warm-up, too; ModelUnavailable if an arm refuses the call."""
    windows = work.task.windows
    largest = max(work.batches, key=lambda b: len(b) * max(len(windows[w].input_ids) for w in b))
    inputs = work.collate([windows[w] for w in largest])
    shape, entries = list(inputs.keywords["input_ids"].shape), []
    for arm in work.arms:
        try:
            peak, how = timing.peak_bytes(partial(arm.call, inputs), work.device)
        except (BackendRefusal, PlanError) as error:
            raise ModelUnavailable(f"attention implementation: {error}") from error
        entries.append({"peak_bytes": peak, "counted": how, "batch_shape": shape})
    return entries


def _plan_entry(model: Any, implementation: str, path: str | None) -> dict[str, Any] | None:
    plan = plan_of(model) if implementation.startswith("adaattn") else None
    if plan is None:
        return None
    digest = hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()
    return {"path": path or "in the model's configuration", "sha256": digest, "budget": plan.budget}


def _digest(windows: Sequence[Window]) -> str:
    digest = hashlib.sha256()
    for window in windows:
        for part in (window.input_ids, window.positions, window.targets):
            digest.update(np.asarray(part, "<i8").tobytes())
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step: a reader sees the old file or the new one, never half of it.

    JSON has no infinity: what is too large for a float (an untrained model's word perplexity) is written as null.
    """
    write_atomically(path, json_text(value, indent=2, ensure_ascii=False) + "\n")
