"""Clusters paired losses by document: whose spread tells the error of their mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DOCUMENTS = 8
"""Documents of one size whose spread tells an error; where there are fewer, chunks of text are taken as independent."""


def clustered(
    names: Sequence[str], sums: Sequence[float], tokens: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns sums and tokens per document, or per chunk of text where documents count for fewer than `DOCUMENTS`.

    They count for as many of one size as (sum of chunks)^2 / sum of squares (Kish 1965, "Survey Sampling"): one book
    with a few pages is one document, whose spread nobody knows.
    """
    chunks = np.array(list(Counter(names).values()))
    enough = chunks.sum() ** 2 >= DOCUMENTS * np.square(chunks).sum()
    keys = list(names) if enough else [str(index) for index in range(len(names))]
    order = {key: cluster for cluster, key in enumerate(dict.fromkeys(keys))}
    clusters = [order[key] for key in keys]
    grouped = np.asarray(np.bincount(clusters, sums), dtype=np.float64)
    return grouped, np.bincount(clusters, tokens).astype(np.int64)
