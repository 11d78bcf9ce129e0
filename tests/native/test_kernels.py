"""Every instruction set that this machine has, on random calls, against double precision."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import through_int8
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.capability import of_level
from adaattn_hf.backends.native import launch
from adaattn_hf.backends.native.launch import rules_of
from adaattn_hf.backends.native.library import LEVELS, level_here, level_names, missing
from adaattn_hf.backends.native.rules import Rules

from ..support.statistics import sqnr

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype, layout: int, scale: float = 1.0) -> Tensor:
    """`[batch, heads, len, dim]` in one of four memory layouts, the last with a gap behind each row."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
    if layout in (1, 2):
        return made.transpose(layout, layout + 1).contiguous().transpose(layout, layout + 1)
    if layout == 3:
        wide = made.new_zeros(*shape[:3], shape[3] + 3)
        wide[..., : shape[3]] = made
        return wide[..., : shape[3]]
    return made


@st.composite
def calls(draw: st.DrawFn) -> AttentionCall:
    batch, kv_heads, groups = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8])))
    q_len = draw(st.one_of(st.integers(1, 8), st.integers(9, 80), st.just(533)))
    kv_len = draw(st.one_of(st.integers(1, 80), st.sampled_from([511, 512, 513, 1100])))
    dim, dim_v = draw(st.sampled_from([1, 7, 16, 33, 64, 80])), draw(st.sampled_from([1, 5, 16, 40, 64]))
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 3))
    causal = draw(st.booleans())
    window = draw(st.one_of(st.none(), st.integers(1, 70)))
    structure = MaskStructure(
        batch, q_len, kv_len, causal=causal, q_offset=draw(st.sampled_from([kv_len - q_len, 0, 3])), window=window,
        sinks=0 if window is None else draw(st.integers(0, 5)),
    )  # fmt: skip
    heads = kv_heads * groups
    scale = draw(st.sampled_from([1.0, 1.0, 30.0]))
    sinks = torch.linspace(-1, 2, heads) if draw(st.booleans()) else None
    return AttentionCall(
        tensor(1, (batch, heads, q_len, dim), dtype, layout, scale),
        tensor(2, (batch, kv_heads, kv_len, dim), dtype, layout),
        tensor(3, (batch, kv_heads, kv_len, dim_v), dtype, layout), structure, dim**-0.5,
        softcap=draw(st.sampled_from([None, None, 5.0])), sink_logits=sinks,
    )  # fmt: skip


def native(asked: AttentionCall, level: str) -> tuple[Tensor, Tensor]:
    tensors, rules = (asked.query, asked.key, asked.value), rules_of(asked)
    out, lse = launch.forward(*tensors, asked.scaling, rules, need_lse=True, level=LEVELS.index(level))
    assert lse is not None
    return out, lse


@pytest.mark.parametrize("level", level_names())
@settings(max_examples=60, deadline=None, derandomize=True)
@given(asked=calls())
def test_random_calls(level: str, asked: AttentionCall) -> None:
    out, lse = native(asked, level)
    truth = reference.attention(asked)
    sharp = 30.0 if asked.query.float().abs().max() > 15 else 1.0
    seen = torch.isfinite(truth.lse)
    assert torch.equal(torch.isfinite(lse), seen)
    # products in bfloat16 use a shorter exponential: 9e-5 relative, a twentieth of the rounding of the weights
    loose = 1e-4 if asked.query.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(lse[seen].double(), truth.lse[seen], atol=loose * sharp, rtol=1e-6)
    error = (out.double() - truth.out).abs().max().item()
    eps = torch.finfo(asked.query.dtype).eps
    # rounding of the weights and of the output, of values that are at most about 4
    assert error <= (1e-5 * sharp if eps < 1e-6 else 4 * eps * max(1.0, truth.out.abs().max().item()))
    assert not out[~seen.transpose(1, 2)].any()


@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 3, 300])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_error_is_1e_5_or_at_most_twice_that_of_torch(level: str, dtype: torch.dtype, q_len: int, scale: float) -> None:
    q = tensor(1, (1, 4, q_len, 64), dtype, 0, scale)
    k, v = tensor(2, (1, 2, 700, 64), dtype, 0), tensor(3, (1, 2, 700, 64), dtype, 0)
    structure = MaskStructure(1, q_len, 700, causal=True, q_offset=700 - q_len)
    asked = AttentionCall(q, k, v, structure, 0.125)
    truth = reference.attention(asked).out
    mask = structure.visible()
    wide_k, wide_v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    theirs = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask, scale=0.125)
    ours = native(asked, level)[0]
    band = torch.finfo(dtype).eps * truth.abs().max().item()
    allowed = 2 * (theirs.transpose(1, 2).double() - truth).abs().max().item() + band
    if dtype == torch.float32:
        allowed = max(allowed, 1e-5)
    assert (ours.double() - truth).abs().max().item() <= allowed


@pytest.mark.parametrize("level", level_names())
def test_huge_scores_stay_finite(level: str) -> None:
    q = torch.full((1, 1, 40, 16), 1e4)
    k, v = tensor(2, (1, 1, 90, 16), torch.float32, 0, 1e3), tensor(3, (1, 1, 90, 8), torch.float32, 0)
    asked = AttentionCall(q, k, v, MaskStructure(1, 40, 90), 1.0)
    out, lse = native(asked, level)
    truth = reference.attention(asked)
    torch.testing.assert_close(out.double(), truth.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), truth.lse, atol=0, rtol=1e-5)


NO_INT8 = pytest.mark.skipif(not of_level(level_here()).int8, reason="no int8 products in these instructions")


def int8_case(q_len: int, kind: str) -> tuple[AttentionCall, AttentionCall, Tensor]:
    """A call, its definition (queries, smoothed keys and values through int8) and the keys' mean."""
    q = tensor(1, (1, 4, q_len, 64), torch.float32, 0)
    k, v = tensor(2, (1, 2, 900, 64), torch.float32, 0), tensor(3, (1, 2, 900, 64), torch.float32, 0)
    if kind == "offset":
        k += 3.0 * tensor(5, (1, 1, 1, 64), torch.float32, 0)
    if kind == "sink":
        # what trained models do: the first key draws most of the weight, and its value is small
        q += 1.0
        k[:, :, 0] = 1.0
        v[:, :, 0] *= 0.05
    mean = k.mean(2)[0].contiguous()
    smooth = through_int8(k - mean[None, :, None]) + mean[None, :, None]
    structure = MaskStructure(1, q_len, 900, causal=True, q_offset=900 - q_len)
    exact = AttentionCall(q, k, v, structure, 0.125)
    return exact, AttentionCall(through_int8(q), smooth, through_int8(v), structure, 0.125), mean


@NO_INT8
@pytest.mark.parametrize("q_len", [7, 900])
@pytest.mark.parametrize("kind", ["plain", "offset", "sink"])
def test_int8_products(q_len: int, kind: str) -> None:
    """Floors: 40 dB of the definition; the loss against exact attention at most 3 dB above the definition's own."""
    asked, defined, mean = int8_case(q_len, kind)
    rules = Rules(causal=True, offset=900 - q_len, compute="int8", key_mean=mean[None])
    out, lse = launch.forward(asked.query, asked.key, asked.value, 0.125, rules, need_lse=True)
    exact, expected = reference.attention(asked), reference.attention(defined)
    assert lse is not None
    assert sqnr(expected.out, out) > 40
    assert sqnr(exact.out, out) > sqnr(exact.out, expected.out) - 3
    torch.testing.assert_close(lse.double(), exact.lse, atol=0.1, rtol=0)


@NO_INT8
def test_int8_products_keep_their_distance_from_exact_attention_beside_an_outlier() -> None:
    """35 dB on Gaussian numbers, with one channel of the keys 20 higher, too; 25 where no mean is taken off."""
    kept = []
    for outlier in (0.0, 20.0):
        q, k, v = (tensor(i, (1, 2, 900, 64), torch.float32, 0) for i in (1, 2, 3))
        k[..., 3] += outlier
        exact = reference.attention(AttentionCall(q, k, v, MaskStructure(1, 900, 900, causal=True), 0.125)).out
        for mean in (k.mean(2), torch.zeros(1, 2, 64)):
            out, _ = launch.forward(q, k, v, 0.125, Rules(causal=True, compute="int8", key_mean=mean))
            kept.append(sqnr(exact, out))
    assert min(kept[:3]) > 35
    assert 25 < kept[3] < kept[2] - 5, "the mean is what helps"


def test_int8_products_are_refused_where_there_are_none() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="instruction set"):
        launch.forward(q, q, q, 1.0, Rules(compute="int8"), level=LEVELS.index("portable"))


@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("q_len", [1, 40, 500])
def test_bfloat16_products_of_float32(level: str, q_len: int) -> None:
    q, k, v = (tensor(i, (1, 2, n, 64), torch.float32, 0) for i, n in ((1, q_len), (2, 500), (3, 500)))
    rules = Rules(causal=True, offset=500 - q_len, compute="bf16")
    out, _ = launch.forward(q, k, v, 0.125, rules, level=LEVELS.index(level))
    structure = MaskStructure(1, q_len, 500, causal=True, q_offset=500 - q_len)
    assert sqnr(reference.attention(AttentionCall(q, k, v, structure, 0.125)).out, out) > 45


@pytest.mark.parametrize("level", level_names())
@pytest.mark.parametrize("q_len", [3, 130])
def test_windows_per_head_and_the_mass_that_log_sum_exps_tell(level: str, q_len: int) -> None:
    q = tensor(1, (1, 6, q_len, 32), torch.float32, 0)
    k, v = (tensor(i, (1, 3, 700, 32), torch.float32, 0) for i in (2, 3))
    windows, sinks = torch.tensor([50, -1, 9]), torch.tensor([4, 0, 0])
    base = Rules(causal=True, offset=700 - q_len)
    _, all_lse = launch.forward(q, k, v, 0.17, base, need_lse=True, level=LEVELS.index(level))
    assert all_lse is not None
    rules = Rules(causal=True, offset=700 - q_len, head_windows=windows, head_sinks=sinks)
    out, lse = launch.forward(q, k, v, 0.17, rules, need_lse=True, level=LEVELS.index(level))
    assert lse is not None
    whole = MaskStructure(1, q_len, 700, causal=True, q_offset=700 - q_len)
    full = reference.attention(AttentionCall(q, k, v, whole, 0.17))
    for head, (window, sink) in enumerate(zip(windows.tolist(), sinks.tolist(), strict=True)):
        part = slice(2 * head, 2 * head + 2)
        structure = whole.with_changes(window=None if window < 0 else window, sinks=sink)
        asked = AttentionCall(q[:, part], k[:, head : head + 1], v[:, head : head + 1], structure, 0.17)
        truth = reference.attention(asked)
        torch.testing.assert_close(out[:, :, part].double(), truth.out, atol=3e-6, rtol=0)
        assert truth.lse is not None
        assert full.lse is not None
        kept = torch.exp(truth.lse - full.lse[:, part])
        lost = -torch.expm1(lse - all_lse)[:, part]
        torch.testing.assert_close(lost.double(), 1 - kept, atol=1e-5, rtol=0)


def test_threads_of_python_do_not_disturb_one_another() -> None:
    kinds = [(300, torch.float32), (700, torch.bfloat16), (33, torch.float32), (1, torch.float16)]
    inputs = [[tensor(10 * i + j, (1, 2, n, 64), dtype, 0) for j in range(3)] for i, (n, dtype) in enumerate(kinds)]
    rules = Rules(causal=True)
    alone = [launch.forward(*x, 0.125, rules)[0] for x in inputs]

    def work(which: int) -> bool:
        outs = [launch.forward(*inputs[which], 0.125, rules)[0] for _ in range(30)]
        return all(torch.equal(out, alone[which]) for out in outs)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, [0, 1, 2, 3] * 2))


@pytest.mark.parametrize(
    ("q_len", "heads", "dtype"),
    [(1, 2, torch.bfloat16), (600, 2, torch.bfloat16), (600, 1, torch.float32), (3000, 3, torch.float32)],
)
def test_result_does_not_depend_on_the_number_of_threads(q_len: int, heads: int, dtype: torch.dtype) -> None:
    """One thread packs float32 tile by tile; several share what is packed where there are fewer heads than threads."""
    q = tensor(1, (1, 2 * heads, q_len, 64), dtype, 0)
    k, v = (tensor(i, (1, heads, 3000, 64), dtype, 0) for i in (2, 3))
    rules, before = Rules(causal=True, offset=3000 - q_len), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(launch.forward(q, k, v, 0.125, rules)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
