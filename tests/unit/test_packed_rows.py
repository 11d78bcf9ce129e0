"""Packing runs for a kernel of unequal lengths: torch's own needs CUDA (tests/gpu), here a loop stands for it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.request import AttentionRequest, CallSpec
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.sdpa import packed
from adaattn_hf.backends.sdpa.dispatch import additive_mask, way_of
from adaattn_hf.backends.sdpa.packed import layout_for, packed_attention

N = 24
RIGHT = torch.arange(N)[None] < torch.tensor([[N], [7], [13]])
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 15, 5]))[None]
EMPTY_ROW = RIGHT.clone()
EMPTY_ROW[1] = False
GATHERED = {
    "right padding": CallStructure(3, N, N, key_padding=RIGHT),
    "right padding, causal": CallStructure(3, N, N, causal=True, key_padding=RIGHT),
    "left padding, causal": CallStructure(3, N, N, causal=True, key_padding=RIGHT.flip(1)),
    "keys alone are padded": CallStructure(3, 5, N, key_padding=RIGHT),
    "padding behind a past": CallStructure(3, 5, N, causal=True, q_offset=N - 5, key_padding=RIGHT.flip(1)),
}
WHOLE = {
    "documents": CallStructure(1, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "documents both ways": CallStructure(1, N, N, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "chunks": CallStructure(2, N, N, causal=True, chunk=10),
    "chunked prefill": CallStructure(3, 5, N, causal=True, q_offset=N - 5),
}
REFUSED = {
    "window": CallStructure(3, N, N, causal=True, window=5, key_padding=RIGHT),
    "holes": CallStructure(1, N, N, key_padding=(torch.arange(N) % 3 > 0)[None]),
    "two rules": CallStructure(3, 5, N, causal=True, q_offset=9, key_padding=RIGHT.flip(1)),
    "two runs": CallStructure(2, N, N, key_padding=RIGHT[:2]),
    "nothing to see": CallStructure(1, N, N, key_padding=torch.zeros(1, N, dtype=torch.bool)),
}


def loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: packed.Layout,
    places: packed.Places,
    scaling: float,
    gradient: bool,
) -> Tensor:
    """What the kernel is documented to do."""
    assert query.ndim == key.ndim == value.ndim == 3
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = []
    q_cuts, k_cuts = places.q_borders.tolist(), places.k_borders.tolist()
    for (a, b), (c, d) in zip(itertools.pairwise(q_cuts), itertools.pairwise(k_cuts), strict=True):
        assert b - a <= layout.q_longest
        assert d - c <= layout.k_longest
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[c:d]) * scaling
        i, j = torch.arange(b - a)[:, None], torch.arange(d - c)[None]
        hidden = {0: i < 0, 1: j > i, 2: j - (d - c) > i - (b - a)}[layout.rule]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=2)
        out.append(torch.einsum("hqk,khd->qhd", weights, value[c:d]))
    return torch.cat(out)


def draw(structure: CallStructure, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    shapes = ((structure.q_len, heads, 8), (structure.kv_len, kv_heads, 8), (structure.kv_len, kv_heads, 16))
    made = (torch.randn(structure.batch, *shape, dtype=torch.float64) for shape in shapes)
    return tuple(t.transpose(1, 2).requires_grad_() for t in made)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", GATHERED | WHOLE)
def test_equals_reference(monkeypatch: pytest.MonkeyPatch, name: str, gradient: bool) -> None:
    monkeypatch.setattr(packed, "_efficient", loop)
    structure = (GATHERED | WHOLE)[name]
    q, k, v = draw(structure)
    layout = layout_for(structure)
    assert layout is not None
    truth = reference.attention(AttentionRequest(q, k, v, structure, scaling=0.3)).out
    with torch.set_grad_enabled(gradient):
        out = packed_attention(q, k, v, layout, 0.3, gradient=gradient)
    torch.testing.assert_close(out, truth)
    if gradient:
        probe = torch.randn_like(out)
        for ours, theirs in zip(
            torch.autograd.grad(out, (q, k, v), probe),
            torch.autograd.grad(truth, (q, k, v), probe),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)


def test_what_covers_the_batch_is_not_gathered() -> None:
    for name, structure in (GATHERED | WHOLE).items():
        layout = layout_for(structure)
        assert layout is not None
        assert layout.gathers == (name in GATHERED)
        assert layout_for(structure) is layout


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_has_no_rule_for(name: str) -> None:
    assert layout_for(REFUSED[name]) is None


def test_other_vendors_keep_the_calls_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    documents = WHOLE["documents"].with_changes()
    assert layout_for(documents) is None


def spec_of(structure: CallStructure, **changes: object) -> CallSpec:
    q, k, v = (t.detach().float() for t in draw(structure))
    request = AttentionRequest(q, k, v, structure, scaling=0.3)
    return CallSpec.of(request)._replace(**{"device": "cuda", "holes": False, **changes})  # type: ignore[arg-type]


def test_the_shortest_way_is_taken_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_efficient", loop)
    structure = GATHERED["left padding, causal"]
    q, k, v = (t.detach() for t in draw(structure))
    way = way_of(spec_of(structure))
    assert way is not None
    truth = reference.attention(AttentionRequest(q, k, v, structure, scaling=0.3)).out
    torch.testing.assert_close(way(q, k, v, 0.3, structure), truth)
    assert way_of(spec_of(structure, device="cpu")) is None
    assert way_of(spec_of(structure, dtype=torch.float64)) is None
    assert way_of(spec_of(structure, head_dim=6)) is None
    windowed = REFUSED["window"]
    way = way_of(spec_of(windowed))
    assert way is None or way(*(t.detach() for t in draw(windowed)), 0.3, windowed) is None


@pytest.mark.parametrize(("dtype", "grouped"), [(torch.float32, False), (torch.bfloat16, True)])
def test_grouped_heads_are_repeated_where_the_fused_kernel_takes_none(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, grouped: bool
) -> None:
    asked: list[tuple[int, bool]] = []
    operator = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *rest: object, **more: object) -> Tensor:
        asked.append((key.shape[1], bool(more.get("enable_gqa"))))
        return operator(query, key, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    structure = CallStructure(2, 9, 9, causal=True)
    q, k, v = torch.randn(2, 6, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    request = AttentionRequest(q, k, v, structure, scaling=0.3)
    way = way_of(CallSpec.of(request)._replace(device="cuda", dtype=dtype))
    assert way is not None
    torch.testing.assert_close(way(q, k, v, 0.3, structure), reference.attention(request).out.float())
    assert asked == [(2, True) if grouped else (6, False)]


def test_small_masks_are_for_inference() -> None:
    structure = GATHERED["right padding"]
    assert way_of(spec_of(structure, holes=None)) is not None
    assert way_of(spec_of(structure, holes=None, needs_grad=True)) is None


def test_a_small_mask_is_made_once_per_pass() -> None:
    structure = GATHERED["left padding, causal"].with_changes()
    mask = structure.derived(additive_mask, torch.half, torch.device("cpu"))
    assert torch.equal(mask == 0, structure.visible())
    assert bool((mask[~structure.visible()] == float("-inf")).all())
    assert mask.stride(-2) % 16 == 0, "rows start where the kernel wants them"
    assert structure.derived(additive_mask, torch.half, torch.device("cpu")) is mask
    assert additive_mask(structure, torch.float32, torch.device("cpu")).dtype == torch.float32


def test_flash_serves_half_precision_aligned_to_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_has_flash", lambda device: True)
    square, behind = layout_for(WHOLE["documents"]), layout_for(WHOLE["chunked prefill"])
    longer = layout_for(CallStructure(3, N, N, causal=True, key_padding=RIGHT))
    assert square is not None and behind is not None and longer is not None  # noqa: PT018
    half, single = torch.zeros(4, 2, 64, dtype=torch.half), torch.zeros(4, 2, 64)
    assert packed._suits_flash(half, half, square)
    assert packed._suits_flash(half, half, behind)
    assert not packed._suits_flash(half, half, longer)
    assert not packed._suits_flash(single, single, square)
    assert not packed._suits_flash(half, half[..., :32], square)
    assert not packed._suits_flash(half[..., :20], half[..., :20], square)
    monkeypatch.setattr(packed, "_has_flash", lambda device: False)
    assert not packed._suits_flash(half, half, square)
