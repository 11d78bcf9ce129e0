"""`kernels benchmark`: the functions on the device at hand, each answer compared with plain torch operations."""

from __future__ import annotations

import itertools

import torch
from kernels.benchmark import Benchmark
from torch import Tensor


def _reference(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of one sequence in fp32, `[q_len, heads, head_dim]`; the last query stands at the last key."""
    groups = q.shape[1] // k.shape[1]
    query, key, value = (t.float().transpose(0, 1) for t in (q, k, v))
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    p = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    j = torch.arange(k.shape[0], device=q.device)[None]
    seen = j <= p
    if window is not None:
        seen = seen & (j > p - window)
    scores = (query @ key.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(2) @ value).transpose(0, 1).to(q.dtype)


class FlashAdaattn(Benchmark):
    """Packed, windowed and grouped batches, and decoding with pages."""

    seed = 0

    def _draw(self, *shape: int) -> Tensor:
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def setup_packed(self) -> None:
        """32 sequences of 8 to 256 tokens, 12 heads of 64."""
        lengths = torch.randint(8, 257, (32,)).tolist()
        self.sums = [0, *itertools.accumulate(lengths)]
        self.cu = torch.tensor(self.sums, dtype=torch.int32, device=self.device)
        self.q, self.k, self.v = (self._draw(self.sums[-1], 12, 64) for _ in range(3))

    def benchmark_packed(self) -> None:
        """One call for all sequences."""
        self.out = self.kernel.flash_attn_varlen_func(self.q, self.k, self.v, self.cu, self.cu, 256, 256, causal=True)

    def verify_packed(self) -> Tensor:
        """Sequence by sequence."""
        pieces = [_reference(self.q[a:b], self.k[a:b], self.v[a:b]) for a, b in itertools.pairwise(self.sums)]
        return torch.cat(pieces)

    def setup_window(self) -> None:
        """One sequence of 4,096 tokens, 16 heads of 64 over 4, a window of 512."""
        self.q, self.k, self.v = (self._draw(1, 4096, 16, 64), self._draw(1, 4096, 4, 64), self._draw(1, 4096, 4, 64))

    def benchmark_window(self) -> None:
        """Window and grouped heads in one call."""
        self.out = self.kernel.flash_attn_func(self.q, self.k, self.v, causal=True, window_size=(511, 0))

    def verify_window(self) -> Tensor:
        """With a mask."""
        return _reference(self.q[0], self.k[0], self.v[0], 512)[None]

    def setup_pages(self) -> None:
        """Eight sequences of up to 2,048 tokens in pages of 256, one new token each, 16 heads of 64 over 4."""
        self.lengths = torch.randint(256, 2048, (8,)).tolist()
        self.held = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        self.table = torch.randperm(64).view(8, 8).to(torch.int32).to(self.device)
        self.pages = self._draw(64, 256, 4, 64), self._draw(64, 256, 4, 64)
        self.q, self.k, self.v = self._draw(8, 1, 16, 64), self._draw(8, 1, 4, 64), self._draw(8, 1, 4, 64)

    def benchmark_pages(self) -> None:
        """Writes the new tokens (the same every time) and attends."""
        self.out = self.kernel.flash_attn_with_kvcache(
            self.q, *self.pages, self.k, self.v, cache_seqlens=self.held, block_table=self.table, causal=True
        )

    def verify_pages(self) -> Tensor:
        """Sequence by sequence, out of its pages."""
        answers = []
        for row, length in enumerate(self.lengths):
            keys, values = (pages[self.table[row].long()].flatten(0, 1)[: length + 1] for pages in self.pages)
            answers.append(_reference(self.q[row], keys, values))
        return torch.stack(answers)
