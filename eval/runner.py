"""One evaluation from end to end: windows, arms, journal, report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.backends.select import BackendRefusal
from adaattn_hf.errors import ModelUnavailable, UsageError
from adaattn_hf.patches.cache.caches import check_stored
from adaattn_hf.patches.checkpoint import Checkpoint
from adaattn_hf.patches.checkpoint import arms as copies
from adaattn_hf.patches.plans.attach import plan_of
from adaattn_hf.patches.plans.hashes import weight_hash
from adaattn_hf.plans.plan import PlanError
from adaattn_hf.stats.stopwatch import timed

from . import activation, scoring, summary, tasks, team, timing
from .corpora import Corpus
from .journal import NAME as JOURNAL
from .journal import BatchRecord, Journal
from .progress import silent
from .provenance import provenance
from .settings import Settings
from .windows import TokenWindow

FORMAT = 1
REPORT = "report.json"
Told = Callable[[int, int], object]
"""Called with (scored tokens done, scored tokens in all) at the start and after each batch."""


class Arm(NamedTuple):
    """One model under test: its role in the report, its cache, and its plan's entry in the report, if any."""

    role: str
    implementation: str
    model: Any
    cache: str | None
    plan: dict[str, Any] | None


class _Work(NamedTuple):
    """The same batches for every arm; `batches` holds numbers of windows."""

    checkpoint: Checkpoint
    settings: Settings
    windows: Sequence[TokenWindow]
    batches: Sequence[Sequence[int]]
    arms: Sequence[Arm]

    def inputs(self, batch: Sequence[int]) -> scoring.Batch:
        """What every arm reads of a batch."""
        one, padding = self.checkpoint, self.settings.padding
        return scoring.collate([self.windows[w] for w in batch], one.device, padding, one.pad_token())

    def call(self, arm: Arm, inputs: scoring.Batch, streaming: bool) -> Callable[[], torch.Tensor]:
        """What computes the logits of an arm."""
        piece = self.settings.cache_piece
        return lambda: scoring.forward(arm.model, inputs, arm.cache, piece, streaming)

    def record(self, index: int) -> BatchRecord:
        """Runs all arms in turn on one batch."""
        inputs, s, device = self.inputs(self.batches[index]), self.settings, self.checkpoint.device
        logits, elapsed = [list[Any]([None]) * len(self.arms) for _ in range(2)]
        for arm in timing.turn(len(self.arms), index):
            logits[arm], elapsed[arm] = timed(self.call(self.arms[arm], inputs, s.streaming), device)
        watched = activation.is_watched(index, len(self.batches))
        counts = tuple(
            activation.watch(arm.model, self.call(arm, inputs, False)) if arm.plan and watched else None
            for arm in self.arms
        )
        windows = [self.windows[w] for w in self.batches[index]]
        return BatchRecord(scoring.score(logits, windows, inputs.offsets), tuple(elapsed), counts)

    def memory(self) -> list[dict[str, Any]]:
        """Peak bytes of each arm on the largest batch, which warms it up; ModelUnavailable if it refuses the call."""
        largest = max(self.batches, key=lambda batch: len(batch) * max(len(self.windows[w].input_ids) for w in batch))
        inputs, entries = self.inputs(largest), []
        for arm in self.arms:
            call = self.call(arm, inputs, self.settings.streaming)
            try:
                peak, how = timing.peak_bytes(call, self.checkpoint.device)
            except (BackendRefusal, PlanError) as error:
                raise ModelUnavailable(f"attention implementation: {error}") from error
            shape = list(inputs.keywords["input_ids"].shape)
            entries.append({"peak_bytes": peak, "counted": how, "batch_shape": shape})
        return entries


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
    progress: Told = silent,
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
    work = _Work(checkpoint, settings, task.windows, batches, arms)
    sizes = [sum(len(task.windows[w].targets) for w in batch) for batch in batches]
    with Journal(output if crew.leads else None, fingerprint, resume=resume) as journal:
        memory = work.memory()
        journal.records = crew.tell(journal.records)
        done = sum(sizes[index] for index in journal.records)
        progress(done, sum(sizes))
        # of several processes each runs every n-th batch, all know every record
        missing = [index for index in range(len(batches)) if index not in journal.records]
        for index, record in zip(missing, crew.work(missing, work.record), strict=True):
            journal.append(index, record)
            done += sizes[index]
            progress(done, sum(sizes))
        records = tuple(journal.records[index] for index in range(len(batches)))
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
    return [
        Arm(role, name, model, cache, _plan_entry(model, name, plan))
        for model, (role, name, plan, cache) in zip(models, settings.arms, strict=True)
    ]


def _plan_entry(model: Any, implementation: str, path: str | None) -> dict[str, Any] | None:
    plan = plan_of(model) if implementation.startswith("adaattn") else None
    if plan is None:
        return None
    digest = hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()
    return {"path": path or "in the model's configuration", "sha256": digest, "budget": plan.budget}


def _digest(windows: Sequence[TokenWindow]) -> str:
    digest = hashlib.sha256()
    for window in windows:
        for part in (window.input_ids, window.rows, window.targets):
            digest.update(np.asarray(part, "<i8").tobytes())
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step: a reader sees the old file or the new one, never half of it.

    JSON has no infinity: what is too large for a float (an untrained model's word perplexity) is written as null.
    """
    write_atomically(path, json_text(value, indent=2, ensure_ascii=False) + "\n")
