"""The sdpa backend, drawn with crossovers so low that short calls take every way a long one takes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.attention import kind, reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.sdpa import SdpaBackend, dispatch, kernels, masked
from adaattn_hf.backends.sdpa.masked import Band

from ..support.calls import HALF, assert_right, assert_right_gradients, attended, calls, generator, gradchecked, leaves

BACKEND = SdpaBackend()
BANDS = {"WINDOW_ROWS": 4, "BAND_ROWS": 5, "LEAST_ROWS": 2, "SCORES": 300}


@pytest.fixture(autouse=True, scope="module")
def low_crossovers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "SMALL_PAIRS", 0)
        patch.setattr(dispatch, "SHORT_KEYS", 0)
        for name, value in BANDS.items():
            patch.setattr(masked, name, value)
        yield


def fresh(call: AttentionCall) -> AttentionCall:
    return replace(call, structure=call.structure.with_changes())


@settings(max_examples=120)
@given(drawn=calls(), room=st.sampled_from([masked.KEPT_BYTES, 0]))
def test_output(drawn: AttentionCall, room: int) -> None:
    """Masks of bands are kept with their structure, or made again where they have no room: in no other way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked, "KEPT_BYTES", room)
        assert_right(drawn, attended(BACKEND, fresh(drawn)).out)
        assert_right_gradients(drawn, lambda asked: attended(BACKEND, asked).out)


@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
@settings(max_examples=40)
@given(data=st.data())
def test_half_precision(dtype: torch.dtype, data: st.DataObject) -> None:
    drawn = fresh(data.draw(calls(dtype=dtype)))
    assert_right(drawn, attended(BACKEND, drawn).out)


@settings(max_examples=40)
@given(drawn=calls(extras=False), extra=st.sampled_from(["plain", "softcap", "bias"]))
def test_the_way_of_dropout_computes_the_same(drawn: AttentionCall, extra: str) -> None:
    """With a tiny probability almost surely nothing is dropped."""
    more = {"softcap": {"softcap": 3.0}, "bias": {"bias": torch.randn(1, 1, 1, drawn.key.shape[2])}}.get(extra, {})
    tiny = AttentionCall(
        drawn.query, drawn.key, drawn.value, drawn.structure.with_changes(), drawn.scaling, 1e-9, **more
    )
    assert_right(tiny, attended(BACKEND, tiny).out)


@pytest.mark.parametrize("columns", [1, 40])
def test_the_way_of_dropout_adds_a_bias_to_sinks_in_front_of_a_window(columns: int) -> None:
    query, key, value = (torch.randn(1, 2, 40, 8, generator=generator(seed)) for seed in range(3))
    bias = torch.randn(1, 2, 40, columns, generator=generator(3))
    structure = MaskStructure(1, 40, 40, causal=True, window=4, sinks=2)
    tiny = AttentionCall(query, key, value, structure, 0.3, 1e-9, bias=bias)
    assert_right(tiny, attended(BACKEND, tiny).out)


def test_a_step_whose_products_half_precision_cannot_say() -> None:
    query = torch.full((1, 2, 1, 128), 30.0, dtype=torch.float16)
    key, value = (torch.randn(1, 2, 40, 128, generator=generator(seed)).half() for seed in range(2))
    structure = MaskStructure(1, 1, 40, causal=True, q_offset=39)
    call = AttentionCall(query, key * 0.1 + 30, value, structure, 128**-0.5)
    assert (query.float() @ call.key.float().mT > torch.finfo(torch.float16).max).all()
    assert_right(call, attended(BACKEND, call).out)


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_that_are_padding_see_the_keys_with_holes(causal: bool, offset: int) -> None:
    """Those of the first row, some of the second, all of the last, whose keys are padding, too."""
    padding = torch.ones(3, 12, dtype=torch.bool)
    padding[0, [2, 8, 9, 10, 11]], padding[1, [1, 5]], padding[2] = False, False, False
    structure = MaskStructure(3, 4, 12, causal, q_offset=offset, key_padding=padding)
    query, key = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 12, 8)
    assert structure.segments() is None
    call = AttentionCall(query, key, key, structure, 0.3)
    found, truth = attended(BACKEND, call), reference.attention(call)
    torch.testing.assert_close(found.out, truth.out.float())
    assert found.out[:2].any(3).any(2).all()
    assert not found.out[2].any()


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] * 7 + [1] * 2]).bool()
STEPS = {
    "all keys": MaskStructure(3, 1, 9),
    "the last place": MaskStructure(3, 1, 9, causal=True, q_offset=8),
    "a cache that is not full": MaskStructure(3, 1, 9, causal=True, q_offset=torch.tensor(4)),
    "a window": MaskStructure(3, 1, 9, causal=True, q_offset=8, window=4),
    "padding of many lengths": MaskStructure(3, 1, 9, causal=True, q_offset=8, key_padding=PADDED),
    "padding of few lengths": MaskStructure(3, 1, 9, causal=True, q_offset=8, key_padding=PADDED[[1, 1, 0]]),
    "a row that sees nothing": MaskStructure(3, 1, 9, key_padding=PADDED & torch.tensor([[1], [0], [1]]).bool()),
    "before the first key": MaskStructure(3, 1, 9, causal=True, q_offset=-1),
    "a window whose sinks are all that it would hide": MaskStructure(
        3, 1, 9, causal=True, q_offset=9, window=6, sinks=4, key_padding=PADDED
    ),
    "a window that ends before the last key": MaskStructure(3, 1, 9, q_offset=-1, window=9),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("case", list(STEPS))
def test_one_query(case: str, groups: int, dtype: torch.dtype) -> None:
    # two layouts: keys in a cache of their own, and a slice of a wider one; queries with and without gaps
    wide, apart = (torch.randn(2, 3, 2, 12, 16).to(dtype), torch.randn(3, 2 * groups, 1, 16, 2).to(dtype)[..., 0])
    for query, (key, value) in zip(
        (apart, apart.contiguous(), apart),
        (wide[:, :, :, :9], wide[:, :, :, :9].contiguous(), wide[:, :, :, :9].contiguous()),
        strict=True,
    ):
        call = AttentionCall(query, key, value, STEPS[case].with_changes(), 0.25)
        found = attended(BACKEND, call).out
        assert found.shape == (3, 1, 2 * groups, 16)
        assert_right(call, found)


LONG = {
    "suffix": MaskStructure(2, 13, 29, causal=True, q_offset=16),
    "window": MaskStructure(1, 23, 23, causal=True, window=5),
    "window with sinks": MaskStructure(2, 23, 23, causal=True, window=5, sinks=2),
    "window both ways": MaskStructure(1, 23, 23, window=4, sinks=1),
    "documents": MaskStructure(
        1, 24, 24, causal=True, q_segments=torch.arange(3).repeat_interleave(8)[None],
        k_segments=torch.arange(3).repeat_interleave(8)[None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "bias"])
@pytest.mark.parametrize("case", list(LONG))
def test_gradcheck(case: str, extra: str) -> None:
    assert gradchecked(lambda asked: attended(BACKEND, asked).out, LONG[case].with_changes(), extra)


@pytest.mark.parametrize("sinks", [0, 3])
def test_a_window_becomes_bands(sinks: int) -> None:
    """The low crossovers do what they are here for; equal bands are one, and share a mask behind sinks."""
    structure = MaskStructure(2, 40, 40, causal=True, window=6, sinks=sinks)
    query, key, value = (torch.randn(2, 2, 40, 4) for _ in range(3))
    attended(BACKEND, AttentionCall(query, key, value, structure, 0.5))
    kept = [made for made in structure.made.values() if isinstance(made, tuple)]
    (bands,) = (made for made in kept if made and isinstance(made[0], Band))
    assert [band.count for band in bands] == ([1] * 10 if sinks else [1, 1, 8])
    assert len({id(band.mask) for band in bands}) == (4 if sinks else 3)


KEPT = {
    **LONG,
    "left padding": MaskStructure(2, 6, 6, causal=True, key_padding=torch.arange(6) >= torch.tensor([[2], [0]])),
    "holes": MaskStructure(2, 6, 6, causal=True, key_padding=torch.arange(6) % 2 == torch.tensor([[1], [0]])),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept_in_inference_mode_serves_gradients(case: str) -> None:
    """Passes of like shape share a structure, an evaluation and the training behind it."""
    structure = KEPT[case].with_changes()
    query, key = (
        torch.randn(structure.batch, 4, structure.q_len, 8),
        torch.randn(structure.batch, 2, structure.kv_len, 8),
    )
    with torch.inference_mode():
        before = attended(BACKEND, AttentionCall(query, key, key, structure, 0.3)).out
    query.requires_grad_()
    key.requires_grad_()
    after = attended(BACKEND, AttentionCall(query, key, key, structure, 0.3)).out
    assert torch.equal(before, after)
    after.sum().backward()
    assert query.grad is not None
    assert query.grad.any()


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("sinks", [0, 1, 2])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_step_sees_the_keys_that_sinks_add_to_its_window(window: int, sinks: int, offset: int) -> None:
    """Also where window and sinks together hide nothing, in rows of different padding."""
    padding = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]).bool()
    query, key, value = (torch.randn(4, 1, n, 8, generator=generator(0)) for n in (1, 2, 2))
    structure = MaskStructure(4, 1, 2, causal=True, q_offset=offset, window=window, sinks=sinks, key_padding=padding)
    call = AttentionCall(query, key, value, structure, 0.5)
    torch.testing.assert_close(attended(BACKEND, call).out, reference.attention(call).out.float())


@settings(max_examples=40)
@given(drawn=calls())
def test_older_torch_is_given_as_many_key_heads_as_queries(drawn: AttentionCall) -> None:
    """Before 2.9 its kernel would write past grouped keys; the gradients are those of the keys given."""
    found = []
    for grouped in (True, False):
        ours, tensors = leaves(drawn)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_GROUPED_ON_CPU", grouped and kernels._GROUPED_ON_CPU)
            out = attended(BACKEND, ours).out
            if not out.requires_grad:
                return  # nothing is visible at all
            gradients = torch.autograd.grad(out.square().sum(), tensors, materialize_grads=True)
        found.append((out.detach(), *gradients))
    for before, after in zip(*found, strict=True):
        assert before.shape == after.shape
        scale = max(1.0, float(before.abs().amax()))
        assert float((before - after).abs().amax()) <= 1e-4 * scale
