"""The spectrum of Q K^T from head_dim x head_dim Gram matrices, and the best factors of a given score rank.

    sigma(Q K^T) = sigma(A^(1/2) B^(1/2))   with A = Q^T Q and B = K^T K

is exact, O(n d^2 + d^3) without an n x n matrix, and Grams of pieces add up. Centre the keys first: what is
constant over keys shifts every logit of a row alike, and softmax does not see it. The best scores of rank r in
the Frobenius norm are

    Q (A^(-1/2) U_r) (U_r^T A^(1/2)) K^T
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gram:
    """Moments of a key/value head, mergeable by addition, all fp64: Q^T Q and K^T K, the sum of keys, their number."""

    query: Tensor
    key: Tensor
    key_sum: Tensor
    count: int

    def __add__(self, other: Self) -> Self:
        """Returns the moments of both samples together."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return type(self)(**sums)

    @property
    def key_mean(self) -> Tensor:
        """Mean key `[…, head_dim]`."""
        return self.key_sum / max(self.count, 1)

    def centred(self) -> Self:
        """Returns the moments with the keys measured from their mean."""
        outer = self.key_sum[..., :, None] * self.key_sum[..., None, :] / max(self.count, 1)
        return replace(self, key=self.key - outer, key_sum=torch.zeros_like(self.key_sum))


def gram(query: Tensor, key: Tensor) -> Gram:
    """Returns the moments per key/value head, `[num_kv_heads, head_dim, head_dim]`, summed over batch and positions.

    Queries are `[batch, heads, q_len, head_dim]`, keys `[batch, num_kv_heads, kv_len, head_dim]`. The Gram of the
    queries stacks all query heads that share the key/value head, because one basis of the keys must serve them all.
    """
    groups, width = key.shape[1], query.shape[-1]
    rows = query.double().transpose(0, 1).reshape(groups, -1, width)
    keys = key.double().transpose(0, 1).reshape(groups, -1, width)
    return Gram(rows.mT @ rows, keys.mT @ keys, keys.sum(1), keys.shape[1])


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > values.amax(-1, keepdim=True) * torch.finfo(matrix.dtype).eps * matrix.shape[-1]
    roots = [torch.where(kept, values.clamp(min=1e-300).pow(power), 0.0) for power in (0.5, -0.5)]
    root, inverse = ((vectors * one[..., None, :]) @ vectors.mT for one in roots)
    return root, inverse


def score_spectrum(moments: Gram) -> Tensor:
    """Returns the singular values of Q K^T, `[…, head_dim]` descending, exact up to rounding."""
    values: Tensor = torch.linalg.svdvals(_roots(moments.query)[0] @ _roots(moments.key)[0])
    return values


def score_factors(moments: Gram, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the projections `(query_basis, key_basis)`, each `[…, head_dim, rank]`, of the best rank-r scores.

    (Q @ query_basis) @ (K @ key_basis)^T is the best approximation of Q K^T of that rank, in 1 … head_dim, in the
    Frobenius norm, over the data that the moments were measured on.
    """
    root, inverse = _roots(moments.query)
    # left singular vectors of A^(1/2) B^(1/2), the largest last
    basis = torch.linalg.eigh(root @ moments.key @ root).eigenvectors[..., -rank:].flip(-1)
    return inverse @ basis, root @ basis


def effective_rank(spectrum: Tensor) -> Tensor:
    """Returns the exponential of the entropy of the normalised singular values (Roy and Vetterli, 2007)."""
    share = spectrum / spectrum.sum(-1, keepdim=True).clamp(min=1e-300)
    return (-torch.xlogy(share, share).sum(-1)).exp()


def energy_rank(spectrum: Tensor, energy: float) -> Tensor:
    """Returns the smallest rank that keeps a share `energy`, in (0, 1], of the squared singular values."""
    running = spectrum.square().cumsum(-1)
    return (running < energy * running[..., -1:] * (1 - 1e-12)).sum(-1) + 1
