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
from adaattn_hf.stats.paired import TokenScores
from adaattn_hf.stats.stopwatch import timed

from . import activation, scoring, summary, tasks, team, timing
from .corpora import Corpus
from .journal import BatchRecord, Journal
from .progress import silent
from .provenance import provenance
from .settings import Settings

FORMAT = 1
REPORT = "report.json"


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
    weights, digest = weight_hash(checkpoint.model), hashlib.sha256()
    for window in windows:
        for part in (window.input_ids, window.rows, window.targets):
            digest.update(np.asarray(part, "<i8").tobytes())
    fingerprint = {
        "model": checkpoint.name,
        "weights": weights,
        "dtype": checkpoint.dtype,
        "device": device.type,
        "data": corpus.sha256,
        "windows": digest.hexdigest(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{f"settings.{key}": value for key, value in asdict(settings).items()},
        "plans": [arm.plan and arm.plan["sha256"] for arm in arms],
    }
    batches = scoring.plan_batches(windows, settings.batch_size, settings.padding)
    sizes = [sum(len(windows[w].targets) for w in batch) for batch in batches]

    def inputs_of(batch: Sequence[int]) -> scoring.Batch:
        return scoring.collate([windows[w] for w in batch], device, settings.padding, checkpoint.pad_token())

    def logits_of(arm: Arm, keywords: scoring.Keywords, streaming: bool) -> Callable[[], torch.Tensor]:
        return lambda: scoring.forward(arm.model, keywords, arm.cache, settings.cache_piece, streaming)

    def record(index: int) -> BatchRecord:
        """Runs all arms in turn on one batch."""
        keywords, offsets = inputs_of(batches[index])
        logits, elapsed = [list[Any]([None]) * len(arms) for _ in range(2)]
        for at in timing.turn(len(arms), index):
            logits[at], elapsed[at] = timed(logits_of(arms[at], keywords, settings.streaming), device)
        watched = activation.is_watched(index, len(batches))
        counts = tuple(
            activation.watch(arm.model, logits_of(arm, keywords, False)) if arm.plan and watched else None
            for arm in arms
        )
        return BatchRecord(scoring.score(logits, [windows[w] for w in batches[index]], offsets), tuple(elapsed), counts)

    def peak(arm: Arm, keywords: scoring.Keywords) -> dict[str, Any]:
        """Peak bytes of an arm on a batch, which warms it up; ModelUnavailable if it refuses the call."""
        try:
            most, how = timing.peak_bytes(logits_of(arm, keywords, settings.streaming), device)
        except (BackendRefusal, PlanError) as error:
            raise ModelUnavailable(f"attention implementation: {error}") from error
        return {"peak_bytes": most, "counted": how, "batch_shape": list(keywords["input_ids"].shape)}

    crew = team.present()
    with Journal(output if crew.leads else None, fingerprint, resume=resume) as journal:
        largest, _ = inputs_of(
            max(batches, key=lambda batch: len(batch) * max(len(windows[w].input_ids) for w in batch))
        )
        memory = [peak(arm, largest) for arm in arms]
        journal.records = crew.tell(journal.records)
        done = sum(sizes[index] for index in journal.records)
        progress(done, sum(sizes))
        # of several processes each runs every n-th batch, all know every record
        missing = [index for index in range(len(batches)) if index not in journal.records]
        for index, batch_record in zip(missing, crew.work(missing, record), strict=True):
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
            "documents": len({w.document for w in windows}),
            "sha256": corpus.sha256,
        },
        "settings": {**asdict(settings), "context": task.context},
        "protocol": task.protocol,
        "plans": [arm.plan and {"role": arm.role, **arm.plan} for arm in arms],
        "quality": summary.quality(task, scores, of_window, of_document, roles, corpus.kind),
        "activation": per_arm(
            [
                activation.rate(arm.implementation, arm.plan is not None, [one.activation[i] for one in records])
                for i, arm in enumerate(arms)
            ]
        ),
        "cost": {
            "speed": per_arm(summary.speed(records, sum(len(w.input_ids) for w in windows))),
            "memory": per_arm(memory),
        },
        "provenance": provenance(device),
    }
    if output is not None and crew.leads:
        write_json(output / REPORT, report)
    return Measured(report, scores, of_document, records)


def evaluate(checkpoint: Checkpoint, corpus: Corpus, settings: Settings, **how: Any) -> dict[str, Any]:
    """Returns the report of `measure` (JSON values; see `adaattn_hf.eval.report` for tables of it)."""
    return measure(checkpoint, corpus, settings, **how).report


def _arms(checkpoint: Checkpoint, settings: Settings, context: int) -> list[Arm]:
    _, names, plans, _ = zip(*settings.arms, strict=True)
    models = copies(checkpoint, names, plans)
    if settings.cache is not None:
        try:
            check_stored(models[1], settings.cache, settings.streaming)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if settings.streaming:
        tested = plan_of(models[1])
        limit = 0 if tested is None else tested.max_length
        if context > limit:
            raise UsageError(
                f"streaming: got windows of {context} tokens and a plan that speaks for {limit}, expected "
                f"--context {limit} or less"
            )
    arms = []
    for model, (role, name, path, cache) in zip(models, settings.arms, strict=True):
        entry, plan = None, plan_of(model) if name.startswith("adaattn") else None
        if plan is not None:
            digest = hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()
            entry = {"path": path or "in the model's configuration", "sha256": digest, "budget": plan.budget}
        arms.append(Arm(role, name, model, cache, entry))
    return arms


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step: a reader sees the old file or the new one, never half of it.

    JSON has no infinity: what is too large for a float (an untrained model's word perplexity) is written as null.
    """
    write_atomically(path, json_text(value, indent=2, ensure_ascii=False) + "\n")
