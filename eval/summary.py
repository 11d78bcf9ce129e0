"""Records of all batches into the report's numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from adaattn_hf.stats.paired import Flag, Float, TokenScores, joined

from . import compare
from .journal import BatchRecord
from .perplexity import totals
from .tasks import Task
from .timing import ratio_summary


@dataclass(frozen=True)
class Tokens:
    """All scored tokens of a run in the order of the documents, with each one's document and window `[tokens]`."""

    scores: TokenScores
    document: npt.NDArray[np.int64]
    window: npt.NDArray[np.int64]


def gather(task: Task, batches: Sequence[Sequence[int]], records: Sequence[BatchRecord]) -> Tokens:
    """The tokens of all batches, sorted by window."""
    of_window = np.concatenate(
        [np.full(len(task.windows[w].targets), w, dtype=np.int64) for batch in batches for w in batch]
    )
    order = np.argsort(of_window, kind="stable")
    scores = joined([record.scores for record in records]).ordered(order)
    window = of_window[order]
    document = np.asarray([task.windows[w].document for w in window], dtype=np.int64)
    return Tokens(scores, document, window)


def quality(task: Task, tokens: Tokens, roles: Sequence[tuple[str, str]], kind: str) -> dict[str, Any]:
    """The quality part of a report: one entry per arm, and per arm after the first its comparison with stock."""
    clusters, unit = tokens.document, "documents"
    if kind == "pages" and len(np.unique(tokens.document)) == 1:
        clusters, unit = tokens.window, "windows (there is one document only)"
    arms, comparisons = [], []
    for arm, (role, implementation) in enumerate(roles):
        entry = {"role": role, "implementation": implementation}
        nll, hit = tokens.scores.nll[arm], tokens.scores.hit[arm]
        found = totals(math.fsum(nll), len(nll), task.words, task.bytes)
        arms.append({**entry, **found, **(_last_word(nll, hit, tokens) if kind == "lastword" else {})})
        if arm:
            comparisons.append({**entry, **_comparison(tokens, arm, clusters, kind), "clusters_are": unit})
    return {"arms": arms, "comparisons": comparisons}


def _last_word(nll: Float, hit: Flag, tokens: Tokens) -> dict[str, Any]:
    right = compare.group_all(hit, tokens.document)
    words = compare.group_sums(nll, tokens.document)
    return {"items": len(right), "accuracy": float(right.mean()), "last_word_perplexity": math.exp(words.mean())}


def _comparison(tokens: Tokens, arm: int, clusters: npt.NDArray[np.int64], kind: str) -> dict[str, Any]:
    scores = tokens.scores
    delta = scores.nll[arm] - scores.nll[0]
    sums, counts = compare.group_sums(delta, clusters), np.unique(clusters, return_counts=True)[1]
    difference = compare.paired_difference(sums, counts)
    result: dict[str, Any] = {
        "delta_nll": difference,
        "perplexity_ratio": _ratio(difference),
        "abs_delta_nll_mean": float(np.abs(delta).mean()),
        **compare.divergence(scores.kl[arm - 1], scores.agree[arm - 1]),
    }
    if kind == "lastword":
        per_word = compare.paired_difference(sums, np.ones_like(counts))
        right = [compare.group_all(scores.hit[a], tokens.document) for a in (0, arm)]
        result |= {
            "delta_nll_per_word": per_word,
            "last_word_perplexity_ratio": _ratio(per_word),
            "flips": compare.flips(right[0], right[1]),
        }
    return result


def _ratio(difference: Mapping[str, Any]) -> dict[str, float | None]:
    keys = {"value": "mean", "low": "low", "high": "high", "upper": "upper"}
    found = {name: difference[key] for name, key in keys.items()}
    return {name: None if value is None else math.exp(value) for name, value in found.items()}


def speed(records: Sequence[BatchRecord], tokens: int) -> list[dict[str, Any]]:
    """Per arm, stock first: tokens per second, and how many times stock's speed (clock, processor time).

    `tokens` is how many tokens an arm read in all batches together.
    """
    wall = np.asarray([[e.wall for e in r.elapsed] for r in records])
    process = np.asarray([[e.process for e in r.elapsed] for r in records])
    entries = []
    for arm in range(wall.shape[1]):
        total = float(wall[:, arm].sum())
        entry: dict[str, Any] = {
            "wall_s": total,
            "process_s": float(process[:, arm].sum()),
            "tokens_per_s": tokens / total,
        }
        if arm:
            entry["speed_ratio_wall"] = ratio_summary(wall[:, 0].tolist(), wall[:, arm].tolist())
            entry["speed_ratio_process"] = ratio_summary(process[:, 0].tolist(), process[:, arm].tolist())
        entries.append(entry)
    return entries
