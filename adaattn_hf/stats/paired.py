"""Paired comparison of models on the same tokens: scores per token, and a clustered ratio estimator with bounds.

Tokens of one document are not independent, so documents (or chunks of text) are the sampling unit
(Miller 2024, "Adding Error Bars to Evals"). The estimator is the ratio of sums, sum(difference) / sum(weight), its
standard error the jackknife's: by how much it changes where a cluster is left out. For clusters of one size that is the
usual error of their mean; where one outweighs the others, the residuals of the clusters tell half of it (MacKinnon,
Nielsen and Webb 2023, "Cluster-robust inference: A guide to empirical practice", J. Econometrics 232).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

Float = NDArray[np.float64]
Flag = NDArray[np.bool_]
DOCUMENTS = 8
"""Documents of one size whose spread tells an error; where there are fewer, chunks of text are taken as independent."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of each token under several models (arms); arm 0 is stock attention.

    Attributes:
        nll: `[arms, tokens]`, -log p(target), nats.
        kl: `[arms - 1, tokens]`, KL(stock || arm) over the full vocabulary, nats.
        hit: `[arms, tokens]`, whether the arm's most probable token is the target.
        agree: `[arms - 1, tokens]`, whether the arm's most probable token is the stock arm's.
    """

    nll: Float
    kl: Float
    hit: Flag
    agree: Flag

    @property
    def delta(self) -> Float:
        """`[arms - 1, tokens]`, nll(arm) - nll(stock), nats."""
        return np.asarray(self.nll[1:] - self.nll[:1])


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """Returns the concatenated scores of several chunks of tokens."""
    names = [field.name for field in fields(TokenScores)]
    return TokenScores(*(np.concatenate([getattr(part, name) for part in parts], axis=1) for name in names))


def score_tokens(logits: Sequence[torch.Tensor], targets: torch.Tensor) -> TokenScores:
    """Returns the scores of tokens from the logits `[tokens, vocabulary]` of each arm, the stock arm first.

    Log-probabilities are computed in float64, so that the comparison adds no rounding: equal logits give a difference
    and a divergence of exactly 0. The `targets` `[tokens]` lie on the device of the logits.
    """
    stock = torch.log_softmax(logits[0].double(), dim=-1)
    probability, stock_top = stock.exp(), stock.argmax(dim=-1)
    nll, hit = [-stock.gather(1, targets[:, None])[:, 0]], [stock_top == targets]
    kl, agree = [], []
    for other in logits[1:]:
        log_p = torch.log_softmax(other.double(), dim=-1)
        top = log_p.argmax(dim=-1)
        nll.append(-log_p.gather(1, targets[:, None])[:, 0])
        hit.append(top == targets)
        agree.append(top == stock_top)
        # a KL divergence is not negative, but its rounded sum may be; 0 * log 0 is 0
        terms = torch.where(probability > 0, probability * (stock - log_p), 0.0)
        kl.append(terms.sum(dim=-1).clamp_min(0.0))
    empty = torch.empty(0, len(targets), dtype=torch.float64, device="cpu")
    return TokenScores(
        nll=torch.stack(nll).cpu().numpy(),
        kl=(torch.stack(kl) if kl else empty).cpu().numpy(),
        hit=torch.stack(hit).cpu().numpy(),
        agree=(torch.stack(agree) if agree else empty.bool()).cpu().numpy(),
    )


@lru_cache(maxsize=4096)
def student_quantile(confidence: float, freedom: int) -> float:
    """Returns the quantile of Student's t."""
    return float(stats.t.ppf(confidence, freedom))


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums over clusters, `sum(values) / sum(weights)`, and its standard error, None of a single cluster."""

    mean: float
    error: float | None
    clusters: int

    def upper(self, confidence: float) -> float:
        """Returns the one-sided upper confidence bound by Student's t, infinite with a single cluster."""
        if self.error is None:
            return math.inf
        return self.mean + student_quantile(confidence, self.clusters - 1) * self.error


def clustered_ratio(values: Float, weights: NDArray[np.int64] | Float) -> Ratio:
    """Returns the ratio of sums with its standard error over clusters; clusters of no weight are none.

    `values` `[clusters]` are sums of paired differences, `weights` `[clusters]` the tokens of each, for a mean per
    token.
    """
    values, weights = values[weights > 0], weights[weights > 0]
    clusters, total = len(values), float(weights.sum())
    mean = float(values.sum() / total)
    if clusters < 2:
        return Ratio(mean, None, clusters)
    changes = (values - mean * weights) / (total - weights)
    error = math.sqrt((clusters - 1) / clusters * float(changes @ changes))
    return Ratio(mean, error, clusters)


def clustered(names: Sequence[str], sums: Sequence[float], tokens: Sequence[int]) -> tuple[Float, NDArray[np.int64]]:
    """Returns sums and tokens per document, or per chunk of text where documents count for fewer than `DOCUMENTS`.

    They count for as many of one size as (sum of chunks)^2 / sum of squares (Kish 1965, "Survey Sampling"): one book
    with a few pages is one document, whose spread nobody knows.
    """
    chunks = np.array(list(Counter(names).values()))
    enough = chunks.sum() ** 2 >= DOCUMENTS * np.square(chunks).sum()
    keys = list(names) if enough else [str(index) for index in range(len(names))]
    order = {key: cluster for cluster, key in enumerate(dict.fromkeys(keys))}
    clusters = [order[key] for key in keys]
    return np.asarray(np.bincount(clusters, sums), dtype=np.float64), np.bincount(clusters, tokens).astype(np.int64)
