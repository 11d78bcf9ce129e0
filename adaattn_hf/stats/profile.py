"""Statistics of attention rows: entropy, support, attention sinks, mass by distance, block density, rounding noise.

Each is computed on sampled query rows, a few at a time, against all keys: O(rows * kv_len) memory and never a whole
`q_len x kv_len` matrix.

Entropy says whether a head is peaked or diffuse. It measures sparsity and not rank: attention to a single key has
entropy 0 and full rank, uniform attention has the largest entropy and rank 1. Ranks come from `stats.spectrum`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..attention.call import AttentionCall
from ..attention.heads import through_dtype, through_int8
from ..attention.softmax import softmax_parts, weighted

DISTANCES = (0, 16, 64, 256, 1024, 4096, 16384)
"""Lower edges of the distance bins, in tokens between query and key; the last bin is open."""
SINK_KEYS = 4
"""Number of first keys whose attention mass is the sink mass."""
BLOCK = 64
"""Keys per block of the block density."""
DENSITIES = (0.95, 0.99)
"""Shares of the attention mass for which the block density is computed."""
_MAP_ROWS = 128
"""Rows of a map that are computed at a time."""
_CHUNK_ELEMENTS = 1 << 23  # weights of all heads at a time, 32 MiB in fp32


def stratified_rows(length: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `[min(count, length)]` sorted positions, one drawn from each of `count` >= 1 equal strata.

    Rows are sampled only by position, so that early rows (few keys, peaked) and late ones are represented alike.
    """
    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1 row")
    if count >= length:
        return torch.arange(length, device="cpu")
    edges = torch.linspace(0, length, count + 1, dtype=torch.float64, device="cpu")
    offset = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    rows = (edges[:-1] + offset * (edges[1:] - edges[:-1])).floor().long()
    return rows.clamp_(max=length - 1)


def row_statistics(weights: Tensor, visible: Tensor, positions: Tensor) -> dict[str, Tensor]:
    """Returns the statistics of each row of attention weights, by name.

    Args:
        weights: `[heads, rows, kv_len]`, each row a distribution over its visible keys; a row of zeros where there are
            none.
        visible: Boolean, broadcastable to `weights`.
        positions: `[rows]`, index of each query among the keys.

    Returns:
        `entropy` (nats), `support` (exp of it: the keys of a uniform row of that entropy), `keys` (visible ones),
            `sink_mass`, `block_density_95` and `block_density_99` (the smallest share of the visible blocks of 64 keys
            that holds so much of the attention), each `[heads, rows]`; `distance_mass`, `[heads, rows, bins]`.
    """
    seen = visible.expand_as(weights)
    kv_len = weights.shape[-1]
    keys = torch.arange(kv_len, device=weights.device)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    first = seen.to(torch.uint8).argmax(-1, keepdim=True)
    sinks = (keys >= first) & (keys < first + SINK_KEYS)
    edges = torch.tensor(DISTANCES[1:], dtype=torch.int64, device=weights.device)
    distance = (positions[:, None] - keys).abs()
    bins = torch.bucketize(distance, edges, right=True).expand_as(weights)
    by_distance = weights.new_zeros(*weights.shape[:-1], len(DISTANCES)).scatter_add_(-1, bins, weights)
    statistics = {
        "entropy": entropy,
        "support": entropy.exp(),
        "keys": seen.sum(-1).to(weights.dtype),
        "sink_mass": (weights * sinks).sum(-1),
        "distance_mass": by_distance,
    }
    spare = -kv_len % BLOCK
    blocks = torch.nn.functional.pad(weights, (0, spare)).unflatten(-1, (-1, BLOCK)).sum(-1)
    reachable = torch.nn.functional.pad(seen, (0, spare)).unflatten(-1, (-1, BLOCK)).any(-1).sum(-1)
    cumulated = blocks.sort(dim=-1, descending=True).values.cumsum(-1)
    for share in DENSITIES:
        needed = (cumulated < share * cumulated[..., -1:] * (1 - 1e-6)).sum(-1) + 1
        density = needed.to(weights.dtype) / reachable.clamp(min=1)
        statistics[f"block_density_{round(100 * share)}"] = torch.where(
            reachable > 0, density.clamp(max=1.0), torch.zeros_like(density)
        )
    return statistics


def head_sums(
    call: AttentionCall, example: int, visible: Tensor, positions: Tensor, answer: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the sums over rows of `row_statistics`, and the energies of rounding errors, per query head in fp64.

    Args:
        call: Has the sampled rows for queries. With learned sinks weights are normalised over the keys only; the mass
            of the sinks is reported as `learned_sink`.
        example: Number of the one of the batch that is looked at.
        visible: Of it, boolean `[1 or heads, rows, kv_len]`, True = attend.
        positions: `[rows]`, index of each query among the keys.
        answer: `[heads, rows, head_dim_v]`, the output that was computed for these rows, whose error is measured as
            those of int8 and bf16 are.

    Returns:
        Sums by name; `rows` counts the rows with a visible key. `signal` is the energy of the exact output in fp32;
        `noise_int8`, `noise_bf16` and `noise_answer` are the energies of the errors of int8 operands (keys minus their
        mean), of bf16 operands, and of `answer`.
    """
    (batch, heads, rows, _), bias, sink_logits = call.query.shape, call.bias, call.sink_logits
    query, key, value = (tensor[example].float() for tensor in (call.query, call.key, call.value))
    bias = None if bias is None else bias.expand(batch, -1, rows, -1)[example].float()
    live = visible.any(-1).any(0)
    query, positions, visible = query[:, live], positions[live], visible[:, live]
    answer = None if answer is None else answer[:, live].float()
    seen_keys = visible.any(1).any(0)
    centre = key[:, seen_keys].mean(1, keepdim=True)
    rounded = {
        "noise_int8": (through_int8(query), through_int8(key - centre), through_int8(value)),
        "noise_bf16": tuple(through_dtype(t, torch.bfloat16) for t in (query, key, value)),
    }
    sums: dict[str, Tensor] = {"rows": torch.full((heads,), float(query.shape[1]), dtype=torch.float64, device="cpu")}

    def add(name: str, values: Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + values.double().cpu()  # type: ignore[operator]

    def attended(part: slice, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        added = None if bias is None else bias[..., live, :][..., part, :]
        queries, seen = q[None, :, part], visible[:, part]
        weights, top, total = softmax_parts(queries, k[None], call.scaling, softcap=call.softcap, bias=added, mask=seen)
        return weights[0], weighted(weights, v[None], 0.0)[0], (top + torch.log(total))[0, :, :, 0]

    step = max(1, _CHUNK_ELEMENTS // max(heads * key.shape[1], 1))
    for start in range(0, query.shape[1], step):
        part = slice(start, start + step)
        weights, out, lse = attended(part, query, key, value)
        for name, values in row_statistics(weights, visible[:, part], positions[part]).items():
            add(name, values.sum(1))
            if name == "entropy":
                add("entropy_squared", values.square().sum(1))
        kept: float | Tensor = 1.0
        if sink_logits is not None:
            share_of_keys = torch.sigmoid(lse - sink_logits.float()[:, None])
            add("learned_sink", (1.0 - share_of_keys).sum(1))
            kept = share_of_keys[..., None]
        exact = out * kept
        add("signal", exact.square().sum((1, 2)))
        for name, operands in rounded.items():
            add(name, (attended(part, *operands)[1] - out).mul(kept).square().sum((1, 2)))
        if answer is not None:
            add("noise_answer", (answer[:, part] - exact).square().sum((1, 2)))
    return sums


def decibels(signal: Tensor, noise: Tensor) -> Tensor:
    """Returns the ratio of two energies in dB, infinite where there is no noise."""
    return 10.0 * torch.log10(signal / noise)


def pooled_weights(call: AttentionCall, head: int, bins: tuple[int, int]) -> Tensor:
    """Returns the attention map `[rows, columns]` of one query head in the first row of a batch, pooled.

    A pixel is the summed weight of its keys, averaged over its rows; the image has at most `bins` rows and columns.
    Rows are recomputed a few at a time and pooled at once, so that a map of 32k by 32k needs only the memory of a few
    hundred rows.
    """
    structure, rows, kv_len, device = call.structure, call.structure.q_len, call.structure.kv_len, call.key.device
    query, key = call.query[0, head], call.key[0, head // (call.query.shape[1] // call.key.shape[1])].float()
    height, width = min(bins[0], rows), min(bins[1], kv_len)
    column = torch.arange(kv_len, device=device) * width // kv_len
    image = torch.zeros(height, width, dtype=torch.float64, device=device)
    count = torch.zeros(height, dtype=torch.float64, device=device)
    for start in range(0, rows, _MAP_ROWS):
        stop = min(start + _MAP_ROWS, rows)
        seen = structure.visible(start, stop, device=device)
        seen = seen[0, head if seen.shape[1] > 1 else 0]
        part = query[start:stop].float()
        weights = softmax_parts(part[None, None], key[None, None], call.scaling, softcap=call.softcap, mask=seen)[0]
        pooled = weights.new_zeros(len(part), width).index_add_(1, column, weights[0, 0])
        row = torch.arange(start, stop, device=device) * height // rows
        image.index_add_(0, row, pooled.double())
        count.index_add_(0, row, seen.any(-1).double())
    return image / count.clamp(min=1)[:, None]


def means(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns means over rows, standard deviations, and SQNR in dB, from the sums of any number of calls."""
    rows = sums["rows"].clamp(min=1)
    plain = ("entropy", "support", "keys", "sink_mass", "block_density_95", "block_density_99", "learned_sink")
    averages = {name: sums[name] / rows for name in plain if name in sums}
    variance = sums["entropy_squared"] / rows - averages["entropy"].square()
    averages["entropy_deviation"] = variance.clamp(min=0).sqrt()
    averages["distance_mass"] = sums["distance_mass"] / rows[:, None]
    for name in ("int8", "bf16", "answer"):
        if f"noise_{name}" in sums:
            averages[f"sqnr_{name}"] = decibels(sums["signal"], sums[f"noise_{name}"])
    return averages
