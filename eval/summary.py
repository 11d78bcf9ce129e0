"""Records of all batches into the report's numbers: paired differences with intervals that respect documents.

Tokens of one document are not independent, so the document is the unit of resampling (Miller 2024, "Adding Error Bars
to Evals"). The estimator is the ratio of sums, sum(delta) / sum(tokens), i.e. the mean over tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from adaattn_hf.stats.paired import Flag, Float, TokenScores, clustered_ratio, joined

from .journal import BatchRecord, Counts
from .perplexity import totals
from .tasks import Task
from .timing import ratio_summary
from .windows import TokenWindow

Numbers = npt.NDArray[np.int64]
CONFIDENCE = 0.95
RESAMPLES = 10_000
_SEED = 20240607


def paired_difference(delta: Float, tokens: Numbers) -> dict[str, Any]:
    """Mean difference per token with its clustered confidence limits.

    Args:
        delta: `[clusters]`, sum over the cluster's tokens of nll(arm) - nll(stock), nats.
        tokens: `[clusters]`, the cluster's scored tokens.

    Returns:
        `mean` (nats/token); `standard_error`, `low`, `high` (two-sided 95 %) and `upper` (one-sided 95 %
        bound) by Student's t on the clusters' residuals; `bootstrap_low`, `bootstrap_high`, `bootstrap_upper`
        by resampling clusters 10,000 times (percentiles, fixed seed). With a single cluster there is no
        spread to be had: the limits are None.
    """
    ratio = clustered_ratio(delta, tokens)
    mean, clusters, error = ratio.mean, ratio.clusters, ratio.error
    result: dict[str, Any] = {"mean": mean, "clusters": clusters, "tokens": int(tokens.sum()), "confidence": CONFIDENCE}
    limits = ("standard_error", "low", "high", "upper", "bootstrap_low", "bootstrap_high", "bootstrap_upper")
    if error is None:
        return {**result, **dict.fromkeys(limits)}
    two_sided = float(stats.t.ppf((1 + CONFIDENCE) / 2, clusters - 1)) * error
    resampled = stats.bootstrap(
        (delta, tokens.astype(np.float64)), lambda d, n, axis=-1: np.sum(d, axis=axis) / np.sum(n, axis=axis),
        paired=True, vectorized=True, n_resamples=RESAMPLES, batch=max(1, 2_000_000 // len(delta)),
        method="percentile", random_state=np.random.default_rng(_SEED),
    )  # fmt: skip
    drawn = np.sort(np.asarray(resampled.bootstrap_distribution, dtype=np.float64))
    low, high, upper = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2, CONFIDENCE])
    values = (error, mean - two_sided, mean + two_sided, ratio.upper(CONFIDENCE), float(low), float(high), float(upper))
    return {**result, **dict(zip(limits, values, strict=True))}


def divergence(kl: Float, agree: Flag) -> dict[str, float]:
    """KL(stock || arm) over the full vocabulary (nats/token), and the share of equal most probable tokens.

    `kl_p999` is the 99.9th percentile: the tokens that an average hides.
    """
    return {
        "kl_mean": float(kl.mean()),
        "kl_p999": float(np.quantile(kl, 0.999)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(agree.mean()),
    }


def flips(stock: Flag, arm: Flag) -> dict[str, float | int]:
    """Paired right/wrong outcomes: accuracies, both kinds of flip, McNemar's exact test of their balance.

    The p-value is that of a fair coin over the discordant items (two-sided binomial); with none it is 1.
    """
    lost, won = int((stock & ~arm).sum()), int((~stock & arm).sum())
    p_value = float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0
    return {
        "accuracy_stock": float(stock.mean()),
        "accuracy": float(arm.mean()),
        "lost": lost,
        "won": won,
        "mcnemar_p": p_value,
    }


def group_sums(values: Float, groups: Sequence[int] | Numbers) -> Float:
    """`[groups]`, the sum of the values of each group; groups in ascending order."""
    _, inverse = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(inverse, weights=values).astype(np.float64)


def group_all(values: Flag, groups: Sequence[int] | Numbers) -> Flag:
    """`[groups]`, whether all values of each group are true."""
    wrong = group_sums((~values).astype(np.float64), groups)
    return np.asarray(wrong == 0)


def gather(
    windows: Sequence[TokenWindow], batches: Sequence[Sequence[int]], records: Sequence[BatchRecord]
) -> tuple[TokenScores, Numbers]:
    """The scored tokens of all batches in the order of the windows, and the window of each `[tokens]`."""
    window = np.concatenate([np.full(len(windows[w].targets), w, np.int64) for batch in batches for w in batch])
    order = np.argsort(window, kind="stable")
    all_scores = joined([record.scores for record in records])
    return TokenScores(*(getattr(all_scores, one.name)[:, order] for one in fields(TokenScores))), window[order]


def quality(
    task: Task, scores: TokenScores, window: Numbers, document: Numbers, roles: Sequence[tuple[str, str]], kind: str
) -> dict[str, Any]:
    """The quality part of a report: one entry per arm, and per arm after the first its comparison with stock.

    `window` and `document` `[tokens]` are those of each scored token.
    """
    clusters, unit = document, "documents"
    if kind == "pages" and len(np.unique(document)) == 1:
        clusters, unit = window, "windows (there is one document only)"
    counts = np.unique(clusters, return_counts=True)[1]
    arms: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    for arm, (role, implementation) in enumerate(roles):
        entry = {"role": role, "implementation": implementation}
        nll, right = scores.nll[arm], group_all(scores.hit[arm], document)
        figures = totals(math.fsum(nll), len(nll), task.words, task.bytes)
        if kind == "lastword":
            perplexity = math.exp(group_sums(nll, document).mean())
            figures |= {"items": len(right), "accuracy": float(right.mean()), "last_word_perplexity": perplexity}
        arms.append({**entry, **figures})
        if not arm:
            continue
        delta = scores.delta[arm - 1]
        sums = group_sums(delta, clusters)
        difference = paired_difference(sums, counts)
        compared: dict[str, Any] = {
            "delta_nll": difference,
            "perplexity_ratio": _ratio(difference),
            "abs_delta_nll_mean": float(np.abs(delta).mean()),
            **divergence(scores.kl[arm - 1], scores.agree[arm - 1]),
        }
        if kind == "lastword":
            per_word = paired_difference(sums, np.ones_like(counts))
            compared |= {
                "delta_nll_per_word": per_word,
                "last_word_perplexity_ratio": _ratio(per_word),
                "flips": flips(group_all(scores.hit[0], document), right),
            }
        comparisons.append({**entry, **compared, "clusters_are": unit})
    return {"arms": arms, "comparisons": comparisons}


def _ratio(difference: Mapping[str, Any]) -> dict[str, float | None]:
    keys = {"value": "mean", "low": "low", "high": "high", "upper": "upper"}
    return {name: None if (value := difference[key]) is None else math.exp(value) for name, key in keys.items()}


def activation(implementation: str, planned: bool, counted: Sequence[Counts | None]) -> dict[str, Any]:
    """An arm's share of (token, head) pairs in which anything but exact attention ran, or why it has no such rate.

    A short evaluation of a plan for long contexts may never leave the exact path, and then proves nothing about the
    plan. Pairs are `counted` by batch, None for one that was not watched.
    """
    watched = [counts for counts in counted if counts is not None]
    pairs, changed = (sum(counts[place] for counts in watched) for place in (0, 1))
    entry: dict[str, Any] = dict.fromkeys(("rate", "reason", "pairs", "batches"))
    if not implementation.startswith("adaattn"):
        return {**entry, "reason": "it is not the plug-in's"}
    if not planned:
        why = "the model carries no plan, and without one nothing but exact attention runs"
        return {**entry, "rate": 0.0, "reason": why}
    if not pairs:
        return {**entry, "reason": "no attention call was counted"}
    return {"rate": changed / pairs, "reason": None, "pairs": pairs, "batches": len(watched)}


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
