"""Two arms on the same tokens: paired differences with confidence intervals that respect documents.

Tokens of one document are not independent, so the document is the unit of resampling (Miller 2024, "Adding
Error Bars to Evals"). The estimator is the ratio of sums, sum(delta) / sum(tokens), i.e. the mean over
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from adaattn_hf.stats.paired import Flag, Float, clustered_ratio

CONFIDENCE = 0.95
RESAMPLES = 10_000
_SEED = 20240607


def paired_difference(delta: Float, tokens: npt.NDArray[np.int64]) -> dict[str, Any]:
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
    found = clustered_ratio(delta, tokens)
    mean, clusters, error = found.mean, found.clusters, found.error
    result: dict[str, Any] = {"mean": mean, "clusters": clusters, "tokens": int(tokens.sum()), "confidence": CONFIDENCE}
    limits = ("standard_error", "low", "high", "upper", "bootstrap_low", "bootstrap_high", "bootstrap_upper")
    if error is None:
        return {**result, **dict.fromkeys(limits)}
    two_sided = float(stats.t.ppf((1 + CONFIDENCE) / 2, clusters - 1)) * error
    drawn = np.sort(_resampled_means(delta, tokens))
    low, high, upper = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2, CONFIDENCE])
    values = (error, mean - two_sided, mean + two_sided, found.upper(CONFIDENCE), float(low), float(high), float(upper))
    return {**result, **dict(zip(limits, values, strict=True))}


def _resampled_means(delta: Float, tokens: npt.NDArray[np.int64]) -> Float:
    """`[RESAMPLES]`, the estimator on clusters that are drawn with replacement."""

    def ratio(d: Any, n: Any, axis: int = -1) -> Any:
        return np.sum(d, axis=axis) / np.sum(n, axis=axis)

    batch = max(1, 2_000_000 // len(delta))
    drawn = stats.bootstrap(
        (delta, tokens.astype(np.float64)),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=batch,
        method="percentile",
        random_state=np.random.default_rng(_SEED),
    )
    return np.asarray(drawn.bootstrap_distribution, dtype=np.float64)


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


def group_sums(values: Float, groups: Sequence[int] | npt.NDArray[np.int64]) -> Float:
    """`[groups]`, the sum of the values of each group; groups in ascending order."""
    _, inverse = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(inverse, weights=values).astype(np.float64)


def group_all(values: Flag, groups: Sequence[int] | npt.NDArray[np.int64]) -> Flag:
    """`[groups]`, whether all values of each group are true."""
    wrong = group_sums((~values).astype(np.float64), groups)
    return np.asarray(wrong == 0)
