"""The functions of `flash-adaattn`, called directly, against the oracle."""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native import ops

from ..support.calls import HALF

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
WINDOWS = [(-1, -1), (3, 3), (5, 0)]
LENGTHS = [(3, 3), (5, 2), (1, 6), (0, 4), (4, 0), (2, 9)]
"""Queries and keys of packed sequences: square, more queries than keys, one query, none of either."""


def cells(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every cell of some axes in float32, and the last one in half precision, which tests/property draws with all."""
    last = [axis[-1] for axis in axes]
    return [(torch.float32, *cell) for cell in itertools.product(*axes)] + [(half, *last) for half in HALF]


def oracle(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: Any, cap: float | None, sink: Any) -> Any:
    """Output `[q_len, heads, size]` and log-sum-exp `[heads, q_len]` of one sequence, aligned at its end."""
    seen = causal or window[1] == 0, len(k) - len(q), None if window[0] < 0 else window[0] + 1
    tensors = (t[None].transpose(1, 2) for t in (q, k, v))
    structure = MaskStructure(1, len(q), len(k), *seen)
    answer = reference.attention(AttentionCall(*tensors, structure, q.shape[2] ** -0.5, softcap=cap, sink_logits=sink))
    return answer.out[0], answer.lse[0]


def same(ours: Tensor, right: Tensor, dtype: torch.dtype, least: float = 0.0) -> None:
    torch.testing.assert_close(ours.double(), right, atol=max(least, TOLERANCE[dtype]), rtol=0)


def same_lse(ours: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    same(ours, right, dtype, 1e-4)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def sums(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize(
    ("dtype", "causal", "window", "cap", "sinks"), cells([False, True], WINDOWS, [None, 2.0], [False, True])
)
def test_batches(flash: Any, dtype: torch.dtype, causal: bool, window: Any, cap: float | None, sinks: bool) -> None:
    sink = drawn(4, dtype=dtype) if sinks else None
    for q_len, kv_len in ((7, 7), (1, 9), (3, 9), (9, 4)):
        q, k, v = (drawn(2, *shape, dtype=dtype) for shape in ((q_len, 4, 8), (kv_len, 2, 8), (kv_len, 2, 5)))
        asked = dict(causal=causal, window_size=window, softcap=cap, s_aux=sink)
        out, lse, _ = flash.flash_attn_func(q, k, v, return_attn_probs=True, **asked)
        alone = flash.flash_attn_func(q, k, v, **asked)
        for row in range(2):
            right, right_lse = oracle(q[row], k[row], v[row], causal, window, cap, sink)
            same(out[row], right, dtype)
            same(alone[row], right, dtype)
            same_lse(lse[row], right_lse, dtype)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.5])
def test_any_factor_in_double_precision(flash: Any, scale: float) -> None:
    """Which torch's operator serves, whose causal kernel hides keys by an infinity times the factor."""
    q, k, v = (drawn(1, 20, 2, 8, dtype=torch.float64) for _ in range(3))
    out = flash.flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    weights = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf).softmax(3)
    torch.testing.assert_close(out, torch.einsum("bhij,bjhd->bihd", weights, v))


@pytest.mark.parametrize(
    ("dtype", "causal", "window", "sinks", "paged"), cells([False, True], WINDOWS, [False, True], [False, True])
)
def test_packed_sequences(flash: Any, dtype: torch.dtype, causal: bool, window: Any, sinks: bool, paged: bool) -> None:
    sink = drawn(4, dtype=dtype) if sinks else None
    cu_q, cu_k = sums([a for a, _ in LENGTHS]), sums([b for _, b in LENGTHS])
    q = drawn(int(cu_q[-1]) + 2, 4, 8, dtype=dtype)
    k, v = (drawn(int(cu_k[-1]) + 1, 2, 8, dtype=dtype) for _ in range(2))
    keys, values, size, table = k, v, 4, torch.full((len(LENGTHS), 3), -1, dtype=torch.int32)
    if paged:
        keys, values = (drawn(16, size, 2, 8, dtype=dtype) for _ in range(2))
        free = iter(torch.randperm(16).tolist())
        for row, (_, length) in enumerate(LENGTHS):
            for index in range(-(-length // size)):
                table[row, index] = page = next(free)
                first, last = cu_k[row] + index * size, min(cu_k[row] + (index + 1) * size, cu_k[row + 1])
                keys[page, : last - first], values[page, : last - first] = k[first:last], v[first:last]
    more: dict[str, Any] = {"block_table": table} if paged else {}
    out, lse, _ = flash.flash_attn_varlen_func(
        q, keys, values, cu_q, cu_k, 5, 9, causal=causal, window_size=window, s_aux=sink, return_attn_probs=True, **more
    )
    for row, (q_len, kv_len) in enumerate(LENGTHS):
        if q_len and kv_len:
            a, b, c, d = cu_q[row], cu_q[row + 1], cu_k[row], cu_k[row + 1]
            right, right_lse = oracle(q[a:b], k[c:d], v[c:d], causal, window, None, sink)
            same(out[a:b], right, dtype)
            same_lse(lse[:, a:b], right_lse, dtype)
    assert not out[-2:].any()  # tokens of no sequence


@pytest.mark.parametrize(
    ("dtype", "window", "sinks", "new", "paged"), cells(WINDOWS, [False, True], [1, 3], [False, True])
)
def test_decoding_with_a_cache(flash: Any, dtype: torch.dtype, window: Any, sinks: bool, new: int, paged: bool) -> None:
    held, size = [5, 0, 11, -1], 4
    sink = drawn(4, dtype=dtype) if sinks else None
    table = torch.tensor([[3, 7, 1, 0], [9, -1, -1, -1], [2, 4, 5, 6], [-1, -1, -1, -1]], dtype=torch.int32)
    shape = (20, size, 2, 8) if paged else (4, 16, 2, 8)
    k_cache, v_cache = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype)
    q, k, v = (drawn(4, new, heads, 8, dtype=dtype) for heads in (4, 2, 2))

    def tokens(cache: Tensor, row: int, length: int) -> Tensor:
        lying = cache[table[row].clamp(min=0).long()].flatten(0, 1) if paged else cache[row]
        return lying[:length].clone()

    right = []
    for row, length in enumerate(held[:3]):
        key, value = (torch.cat([tokens(c, row, length), more[row]]) for c, more in ((k_cache, k), (v_cache, v)))
        right.append((key, *oracle(q[row], key, value, True, window, None, sink)))
    out, lse = flash.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(held, dtype=torch.int32), causal=True, window_size=window,
        s_aux=sink, return_softmax_lse=True, **({"block_table": table} if paged else {}),
    )  # fmt: skip
    for row, (key, answer, answer_lse) in enumerate(right):
        same(out[row], answer, dtype)
        same_lse(lse[row], answer_lse, dtype)
        assert torch.equal(tokens(k_cache, row, held[row] + new), key)  # written in place
    assert not out[3].any()  # a row without a sequence


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(flash: Any, sinks: bool, compiled: bool) -> None:
    lengths = [(3, 4), (5, 5), (3, 6)]
    cu_q, cu_k = sums([a for a, _ in lengths]), sums([b for _, b in lengths])
    leaves = [drawn(11, 4, 8), drawn(15, 2, 8), drawn(15, 2, 8)] + ([drawn(4)] if sinks else [])
    for leaf in leaves:
        leaf.requires_grad_()
    weight = drawn(11, 4, 8)

    def ours(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Any:
        rules: dict[str, Any] = {"causal": True, "window_size": (3, 3), "softcap": 3.0, "s_aux": sink}
        return flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, **rules)

    def right(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        edges = zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True)
        return torch.cat([oracle(q[a:b], k[c:d], v[c:d], True, (3, 3), 3.0, sink)[0] for (a, b), (c, d) in edges])

    call = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    found = torch.autograd.grad((call(*leaves) * weight).sum(), leaves)
    expected = torch.autograd.grad((right(*leaves) * weight).sum(), leaves)
    for ours_, right_ in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, right_, atol=5e-6, rtol=1e-5)


def test_a_graph_of_a_batch_is_whole(flash: Any) -> None:
    q, k, v = drawn(2, 6, 4, 8), drawn(2, 6, 2, 8), drawn(2, 6, 2, 8)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash.flash_attn_func(q, k, v, causal=True, window_size=(2, 2))

    torch.testing.assert_close(
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v), atol=2e-6, rtol=0
    )


def test_a_graph_without_the_native_kernels_masks(flash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph for a CUDA device does, on this machine."""
    operators = inspect.getmodule(flash.flash_attn_varlen_func)
    traced = inspect.getmodule(operators.traced_varlen)  # type: ignore[union-attr]
    monkeypatch.setattr(traced, "missing", lambda: ("not here",))
    cu_q, cu_k = sums([3, 1, 4]), sums([5, 2, 3])
    q, k, v = drawn(9, 4, 8), drawn(10, 2, 8), drawn(10, 2, 8)
    for causal, window in itertools.product((False, True), WINDOWS):

        def call(q: Tensor, k: Tensor, v: Tensor, causal: bool = causal, window: Any = window) -> Any:
            return flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=causal, window_size=window)

        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
        torch.testing.assert_close(out, call(q, k, v), atol=2e-6, rtol=0)


def test_the_operators_are_what_torch_asks_of_operators(flash: Any) -> None:
    q, k, v = (drawn(*shape).requires_grad_() for shape in ((11, 4, 8), (13, 2, 8), (13, 2, 8)))
    call = (q, k, v, sums([3, 5, 3]), sums([4, 3, 6]), drawn(4).requires_grad_(), 0.3, 2.0, True, 3)
    torch.library.opcheck(getattr(torch.ops, flash.__name__).varlen.default, call)
    # each kernel registers its operators under its own name; a common one would take the package's away
    assert ops.attend_op._qualname.startswith("adaattn_hf::")
    assert hasattr(torch.ops.adaattn_hf, "native_attend")


@pytest.mark.parametrize(("function", "names"), [
    (
        "flash_attn_varlen_func",
        "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap "
        "deterministic block_table page_table s_aux learnable_sink",
    ),
    ("flash_attn_func", "dropout_p softmax_scale causal window_size softcap deterministic s_aux"),
    ("flash_attn_with_kvcache", "cache_seqlens block_table page_table softmax_scale causal window_size softcap"),
])  # fmt: skip
def test_transformers_finds_the_arguments_that_it_looks_for(flash: Any, function: str, names: str) -> None:
    assert set(names.split()) <= set(inspect.signature(getattr(flash, function)).parameters)


@pytest.mark.parametrize(("asked", "words"), [
    ({"dropout_p": 0.1}, "dropout_p: got 0.1, expected 0"),
    ({"alibi_slopes": torch.ones(2)}, "alibi_slopes: got Tensor, expected None"),
    ({"window_size": (3, 1)}, "window_size: got \\(3, 1\\)"),
    ({"s_aux": torch.ones(3)}, "s_aux: got shape \\(3,\\)"),
    ({"s_aux": torch.ones(2), "learnable_sink": torch.ones(2)}, "another name"),
])  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(flash: Any, asked: dict[str, Any], words: str) -> None:
    q = drawn(1, 4, 2, 8)
    flash.flash_attn_func(q, q, q)
    with pytest.raises(ValueError, match=words):
        flash.flash_attn_func(q, q, q, **asked)


@pytest.mark.parametrize(("shapes", "words"), [
    (((1, 4, 2, 8), (1, 4, 2, 4), (1, 4, 2, 4)), "one head size"),
    (((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)), "the same tokens"),
    (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "expected a divisor"),
    (((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "a batch of 1"), (((4, 2, 8), (4, 2, 8), (4, 2, 8)), "expected 4"),
])  # fmt: skip
def test_tensors_that_do_not_belong_together_are_refused(flash: Any, shapes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flash.flash_attn_func(*(drawn(*shape) for shape in shapes))


@pytest.mark.parametrize(("cu_q", "cu_k", "words"), [
    ([0, 3, 9], [0, 3, 4], "cu_seqlens_q: got \\[0, 3, 9\\]"),
    ([0, 3, 4], [0, 4, 3], "cu_seqlens_k: got \\[0, 4, 3\\]"), ([1, 4], [0, 4], "cu_seqlens_q"),
    ([0, 4], [0, 2, 4], "cu_seqlens_k: got 3 entries"),
])  # fmt: skip
def test_sums_that_leave_the_tokens_are_refused(flash: Any, cu_q: list[int], cu_k: list[int], words: str) -> None:
    q = drawn(4, 2, 8)
    with pytest.raises(ValueError, match=words):
        flash.flash_attn_varlen_func(q, q, q, torch.tensor(cu_q), torch.tensor(cu_k))


@pytest.mark.parametrize(("changes", "words"), [
    ({"block_table": torch.tensor([[99]])}, "got page 99"),
    ({"block_table": torch.tensor([[0]]), "cache_seqlens": 4}, "got 1 pages of 4 tokens for sequence 0 of 5"),
    ({"block_table": torch.tensor([[-1]])}, "got page -1"),
    ({"block_table": None, "cache_seqlens": 4}, "in a cache of 4"), ({"rotary_cos": torch.ones(1)}, "rotary_cos"),
    ({"cache_seqlens": None}, "cache_seqlens: got None"),
])  # fmt: skip
def test_caches_that_do_not_hold_the_tokens_are_refused(flash: Any, changes: dict[str, Any], words: str) -> None:
    cache, new = drawn(2, 4, 2, 8), drawn(1, 1, 2, 8)
    asked: dict[str, Any] = dict(cache_seqlens=2, block_table=torch.tensor([[1]])) | changes
    rows = cache[:1] if asked["block_table"] is None else cache
    with pytest.raises(ValueError, match=words):
        flash.flash_attn_with_kvcache(new, rows, rows.clone(), new, new, **asked)


def test_a_cache_knows_no_gradients(flash: Any) -> None:
    cache, new = drawn(1, 4, 2, 8), drawn(1, 1, 2, 8)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        flash.flash_attn_with_kvcache(new.requires_grad_(), cache, cache.clone(), cache_seqlens=2)
