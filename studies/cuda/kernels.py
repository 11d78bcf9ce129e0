"""One layer's attention on the device: dense, masks, windows per head, one query, gradients."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.structure import MaskStructure

from .measure import (
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    KV_HEADS,
    ON_CUDA,
    Cell,
    Section,
    attention_call,
    by,
    captured,
    length,
    race,
    refusals,
    rules_of,
    stock,
    timed,
)

FLASH = ("fa3", "fa3_fwd", "fa4")
PLANS = {
    "every second head 1024+16": (0, length(1024)) * 4,
    "all heads 1024+16": (length(1024),) * 8,
    "mixed: 2 exact, 3 × 1024, 2 × 4096, 1 × 256": (0, 0, *(length(1024),) * 3, *(length(4096),) * 2, length(256)),
}


def dense(section: Section) -> None:
    """Exact causal attention."""
    shapes = [(1, 16384, 16, 16, 128), (4, 4096, 32, 8, 128), (2, 8192, 32, 32, 64), (1, 32768, 32, 8, 128)]
    for batch, n, heads, kv_heads, dim in shapes:

        def cell(
            row: Cell, batch: int = batch, n: int = n, heads: int = heads, kv: int = kv_heads, dim: int = dim
        ) -> None:
            n = length(n)
            r = attention_call(MaskStructure(batch, n, n, causal=True), heads=heads, kv_heads=kv, dim=dim)
            row["FLOP"] = 2.0 * batch * heads * n * n * dim
            beside = {"sdpa": stock(r)}
            if ON_CUDA:
                beside |= {"cudnn": _forced(r, SDPBackend.CUDNN_ATTENTION)}
                beside |= {"flash": _forced(r, SDPBackend.FLASH_ATTENTION)}
            timed(row, r, *FLASH, "triton", "auto", beside=beside)

        section.add(f"{batch} × {n // 1024}k, {heads}/{kv_heads} × {dim}", cell)


def _forced(r: AttentionCall, kernel: SDPBackend) -> Callable[[], Any]:
    """torch's operator by one of its kernels."""
    exact = stock(r)

    def call() -> Any:
        with sdpa_kernel(kernel):
            return exact()

    return call


def _flex(r: AttentionCall, mask: Callable[..., Tensor]) -> Callable[[], Any]:
    """torch's flex attention, compiled, by a mask of positions."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s, heads = r.structure, r.query.shape[1]
    blocks = create_block_mask(mask, s.batch, heads, s.q_len, s.kv_len, device="cuda", _compile=True)
    run = torch.compile(flex_attention)
    grouped = heads != r.key.shape[1]
    return lambda: run(r.query, r.key, r.value, block_mask=blocks, enable_gqa=grouped)


def seen_share(n: int, windows: tuple[int, ...]) -> float:
    """Share of the causal pairs that heads of these windows see."""
    rows = torch.arange(1, n + 1, dtype=torch.float64)
    seen = [rows.sum() if not w else torch.minimum(rows, torch.tensor(w + 16.0)).sum() for w in windows]
    return float(sum(seen)) / (len(windows) * float(rows.sum()))


def prefill(section: Section) -> None:
    """Windows per head in one launch."""
    for thousand in (8, 32):
        for name, windows in PLANS.items():

            def cell(row: Cell, n: int = length(thousand * 1024), windows: tuple[int, ...] = windows) -> None:
                r = attention_call(MaskStructure(1, n, n, causal=True), rules_of(windows))
                share = seen_share(n, windows)
                row["ideal ×"] = 1 / share
                row["FLOP"] = 2.0 * HEADS * n * n * DIM * share
                groups = HEADS // KV_HEADS
                table = torch.tensor([w or 1 << 30 for w in windows], device=DEVICE).repeat_interleave(groups)
                bare = AttentionCall(r.query, r.key, r.value, r.structure, r.scaling)
                beside = {"sdpa": stock(r), "exact, auto": by("auto", bare)}
                if ON_CUDA and len(set(windows)) > 2:
                    beside["flex"] = _flex(r, lambda b, h, q, k: (k <= q) & ((q - k < table[h]) | (k < 16)))
                timed(row, r, "triton", "auto", beside=beside)

            section.add(f"{thousand}k, {name}", cell)


def decode(section: Section) -> None:
    """One query per sequence over a cache."""
    for batch, thousand in ((1, 32), (8, 32), (1, 128)):
        for name, windows in {"exact": (0,) * 8, **PLANS}.items():

            def cell(
                row: Cell,
                batch: int = batch,
                n: int = length(thousand * 1024),
                windows: tuple[int, ...] = windows,
            ) -> None:
                structure = MaskStructure(batch, 1, n, causal=True, q_offset=n - 1)
                r = attention_call(structure, rules_of(windows) if any(windows) else None)
                keys = sum(min(w + 16, n) if w else n for w in windows)
                row["bytes"] = 2.0 * batch * keys * DIM * DTYPE.itemsize
                row["ideal ×"] = n * KV_HEADS / keys
                graphs = {"sdpa, captured": captured(stock(r)), "captured": captured(by("triton", r))}
                timed(row, r, "triton", "auto", beside={"sdpa": stock(r), **graphs})

            section.add(f"{batch} × {thousand}k, {name}", cell)


def training(section: Section) -> None:
    """Forward and backward at 16k."""
    n, structures = length(16384), masks()
    causal = MaskStructure(1, n, n, causal=True)
    made: dict[str, tuple[MaskStructure, HeadRules | None, float]] = {
        "window 1024": (structures["window 1k at 16k"], None, seen_share(n, (length(1024) - 16,))),
        "packed 16 × 1k": (structures["packed 16 × 1k"], None, 1 / 16),
        "every second head 1024+16": (
            causal,
            rules_of((0, length(1024)) * 4),
            seen_share(n, (0, length(1024))),
        ),
        "causal": (causal, None, 1.0),
    }
    for name, (structure, rules, share) in made.items():

        def cell(
            row: Cell,
            structure: MaskStructure = structure,
            rules: HeadRules | None = rules,
            share: float = share,
        ) -> None:
            row["FLOP"] = 7.0 * HEADS * n * n * DIM * share
            _trained(row, structure, rules)

        section.add(name, cell)


def _trained(row: Cell, structure: MaskStructure, rules: HeadRules | None) -> None:
    """Both passes of one structure."""
    r = attention_call(structure, rules, grad=True)
    grad = torch.randn(1, structure.q_len, HEADS, DIM, device=DEVICE, dtype=DTYPE)
    inputs = (r.query, r.key, r.value)

    def both(attend: Callable[[], AttentionResult]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend().out, inputs, grad)

    exact = stock(r)
    arms: dict[str, Callable[[], Any]] = {
        "sdpa, causal": lambda: torch.autograd.grad(exact(), inputs, grad.transpose(1, 2))
    }
    arms |= {name: both(by(name, r)) for name in ("fa4", "triton") if not refusals(name, r)}
    arms["auto"] = both(by("auto", r))
    race(row, arms)


def masks() -> dict[str, MaskStructure]:
    """Calls with padding, documents, a window, and keys before or behind the queries."""
    n, long = length(4096), length(16384)
    left = torch.ones(8, n, dtype=torch.bool)
    for i in range(8):
        left[i, : n * i // 8] = False
    documents = torch.repeat_interleave(torch.arange(16), long // 16)[None].to(DEVICE)
    return {
        "left-padded 8 × 4k": MaskStructure(8, n, n, causal=True, key_padding=left.to(DEVICE)),
        "packed 16 × 1k": MaskStructure(1, long, long, causal=True, q_segments=documents, k_segments=documents),
        "window 1k at 16k": MaskStructure(1, long, long, causal=True, window=length(1024)),
        "512 queries behind 7.5k": MaskStructure(4, length(512), length(8192), causal=True, q_offset=length(7680)),
        "static cache, 4k of 16k in use": MaskStructure(
            8, 1, long, causal=True, q_offset=torch.tensor(n - 1, device=DEVICE)
        ),
    }


def structures(section: Section) -> None:
    """Masks, and what Transformers' sdpa does with a dense mask."""
    for name, structure in masks().items():

        def cell(row: Cell, structure: MaskStructure = structure) -> None:
            r = attention_call(structure)
            groups = HEADS // KV_HEADS
            mask = structure.visible(device=DEVICE).expand(structure.batch, 1, structure.q_len, structure.kv_len)
            row["FLOP"] = 4.0 * HEADS * DIM * float(mask.sum())

            def exact() -> Tensor:
                k, v = r.key.repeat_interleave(groups, 1), r.value.repeat_interleave(groups, 1)
                return F.scaled_dot_product_attention(r.query, k, v, attn_mask=mask)

            timed(row, r, *FLASH, "triton", "auto", beside={"sdpa": exact})

        section.add(name, cell)
