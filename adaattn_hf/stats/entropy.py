"""Row entropy in nats, streamed over the keys, and what follows from it.

With a running maximum m, l = sum exp(s - m) and t = sum exp(s - m) (s - m), the entropy of softmax(s) is
H = ln l - t / l: one pass, no matrix of attention weights. The second power sum gives the collision entropy
-ln sum p^2, whose exponential is the effective number of keys among which independent logit noise averages
out.

Entropy describes a head (peaked or diffuse) and is reported. It is a sparsity signal and not a rank:
attention to one key has entropy zero and full rank, uniform attention has the largest entropy and rank one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaattn_hf.stats.rows import grouped_logits, masked, probabilities


@dataclass(frozen=True)
class RowEntropy:
    """Entropy statistics of rows of attention weights, each `[batch, heads, rows]`.

    Attributes:
        entropy: Shannon entropy in nats; 0 for a row with no visible key.
        collision: Collision (Renyi-2) entropy `-ln sum p^2` in nats.
        lse: Log-sum-exp of the logits; minus infinity for a row with no visible key.
        visible: Number of visible keys.
    """

    entropy: Tensor
    collision: Tensor
    lse: Tensor
    visible: Tensor

    @property
    def effective_support(self) -> Tensor:
        """exp(entropy), the number of keys of a uniform row of the same entropy."""
        return self.entropy.exp()

    @property
    def normalised(self) -> Tensor:
        """Entropy divided by the logarithm of the number of visible keys, in [0, 1]; 0 where one key is visible."""
        ceiling = self.visible.clamp(min=1).to(self.entropy.dtype).log()
        return torch.where(
            ceiling > 0, self.entropy / ceiling.clamp(min=1e-30), torch.zeros_like(self.entropy)
        )


def row_entropy(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    block: int = 1024,
) -> RowEntropy:
    """Returns the entropy statistics of softmax rows, reading the keys in blocks.

    Args:
        query: `[batch, heads, rows, head_dim]`, the sampled rows.
        key: `[batch, num_kv_heads, kv_len, head_dim]`.
        scaling: Factor on the products.
        visible: Boolean, broadcastable to `[batch, heads, rows, kv_len]`, True = attend.
        softcap: `c` of `c * tanh(logit / c)`.
        block: Keys read at a time.
    """
    batch, heads, rows, _ = query.shape
    kv_len = key.shape[2]
    wide = visible.expand(batch, heads, rows, kv_len) if visible is not None else None
    zero = query.new_zeros(batch, heads, rows)
    maximum, total, weighted, squares = zero.fill_(float("-inf")), zero.clone().zero_(), None, None
    weighted, squares = torch.zeros_like(total), torch.zeros_like(total)
    seen = torch.zeros(batch, heads, rows, dtype=torch.long, device=query.device)
    for start in range(0, kv_len, block):
        stop = min(start + block, kv_len)
        allowed = wide[..., start:stop] if wide is not None else None
        logits = masked(grouped_logits(query, key[:, :, start:stop], scaling, softcap), allowed)
        seen += allowed.sum(-1) if allowed is not None else stop - start
        higher = torch.maximum(maximum, logits.amax(-1))
        shift = torch.where(torch.isinf(maximum), torch.zeros_like(higher), maximum - higher)
        factor = shift.exp()
        centred = torch.where(torch.isinf(logits), logits, logits - higher[..., None])
        powers = centred.exp()
        moment = torch.where(torch.isinf(centred), torch.zeros_like(centred), centred) * powers
        weighted = factor * (weighted + shift * total) + moment.sum(-1)
        total = factor * total + powers.sum(-1)
        squares = factor.square() * squares + powers.square().sum(-1)
        maximum = higher
    empty = total == 0
    safe = torch.where(empty, torch.ones_like(total), total)
    entropy = torch.where(empty, torch.zeros_like(total), safe.log() - weighted / safe).clamp(min=0.0)
    collision = torch.where(
        empty, torch.zeros_like(total), 2 * safe.log() - torch.where(empty, safe, squares).log()
    )
    return RowEntropy(entropy, collision.clamp(min=0.0), maximum + total.log(), seen)


@dataclass(frozen=True)
class ScaleEntropy:
    """Entropy split by distance: `entropy = between + sum_b mass_b * within_b` holds exactly (the chain rule).

    Attributes:
        edges: Distance edges; bin b holds the keys at distance in [edges[b], edges[b + 1]).
        mass: `[batch, heads, rows, bins]`, attention weight per bin.
        within: `[batch, heads, rows, bins]`, local entropy (nats) of the weights inside a bin, renormalised.
        between: `[batch, heads, rows]`, global entropy (nats) of the masses of the bins.
    """

    edges: tuple[int, ...]
    mass: Tensor
    within: Tensor
    between: Tensor

    @property
    def entropy(self) -> Tensor:
        """Total row entropy in nats, `[batch, heads, rows]`."""
        return self.between + (self.mass * self.within).sum(-1)

    def variance(self) -> tuple[Tensor, Tensor]:
        """Returns the variance over rows of the global entropy `[batch, heads]` and of each local one `[…, bins]`."""
        return self.between.var(dim=2, unbiased=False), self.within.var(dim=2, unbiased=False)


def dyadic_edges(kv_len: int, first: int = 64) -> tuple[int, ...]:
    """Returns distance edges 0, first, 2 * first, … up to at least `kv_len`."""
    count = max(0, math.ceil(math.log2(max(kv_len, 1) / first))) if kv_len > first else 0
    return (0, *(first * 2**power for power in range(count + 1)))


def scale_entropy(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *,
    scaling: float,
    visible: Tensor | None = None,
    softcap: float | None = None,
    edges: Sequence[int] | None = None,
) -> ScaleEntropy:
    """Returns local and global entropy of rows, by distance between query and key.

    Args:
        query: `[batch, heads, rows, head_dim]`, the sampled rows.
        key: `[batch, num_kv_heads, kv_len, head_dim]`.
        positions: `[rows]`, the place of each row among the keys.
        scaling: Factor on the products.
        visible: Boolean, broadcastable to `[batch, heads, rows, kv_len]`, True = attend.
        softcap: `c` of `c * tanh(logit / c)`.
        edges: Rising distance edges from 0; dyadic from 64 when absent.
    """
    kv_len = key.shape[2]
    bounds = tuple(edges) if edges is not None else dyadic_edges(kv_len)
    weights = probabilities(masked(grouped_logits(query, key, scaling, softcap), visible))
    keys = torch.arange(kv_len, device=query.device)
    distance = (positions[:, None] - keys[None]).abs()
    inner = torch.tensor(bounds[1:-1], device=query.device, dtype=torch.long)
    index = torch.bucketize(distance, inner, right=True).expand_as(weights)
    bins = len(bounds) - 1
    shape = (*weights.shape[:-1], bins)
    mass = weights.new_zeros(shape).scatter_add_(-1, index, weights)
    spread = weights.new_zeros(shape).scatter_add_(-1, index, -torch.xlogy(weights, weights))
    safe = torch.where(mass > 0, mass, torch.ones_like(mass))
    within = torch.where(mass > 0, spread / safe + safe.log(), torch.zeros_like(mass)).clamp(min=0.0)
    return ScaleEntropy(bounds, mass, within, -torch.xlogy(mass, mass).sum(-1))


def mass_sparsity(
    query: Tensor, key: Tensor, mass: float, *, scaling: float, visible: Tensor | None = None
) -> Tensor:
    """Returns per row the smallest share of visible keys that holds `mass` of the attention, `[batch, heads, rows]`.

    Raises:
        ValueError: If `mass` is not in (0, 1].
    """
    if not 0.0 < mass <= 1.0:
        raise ValueError(f"mass is {mass}, expected a share in (0, 1]")
    weights = probabilities(masked(grouped_logits(query, key, scaling), visible))
    ordered = weights.sort(dim=-1, descending=True).values.cumsum(-1)
    needed = (ordered < mass * ordered[..., -1:] * (1 - 1e-6)).sum(-1) + 1
    count = (weights > 0).sum(-1) if visible is None else visible.expand_as(weights).sum(-1)
    share = needed.to(weights.dtype) / count.clamp(min=1)
    return torch.where(count > 0, share.clamp(max=1.0), torch.zeros_like(share))
