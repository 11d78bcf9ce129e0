"""Calls of torch's operator on CUDA, without one: packing runs for a kernel of unequal lengths, masks, grouped heads.

A loop stands for torch's kernel, which needs CUDA (tests/gpu); calls run by run do what it does on processors.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import GRAD, LOOKED, CallKind
from adaattn_hf.attention.packing import FROM_FIRST, Packed
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.capability import of_sm
from adaattn_hf.backends.sdpa import dispatch, kernels, masked, packed
from adaattn_hf.backends.sdpa.dispatch import way_of
from adaattn_hf.backends.sdpa.kernels import operator
from adaattn_hf.backends.sdpa.masked import additive_mask
from adaattn_hf.backends.sdpa.packed import layout_of, packed_attention

from ..support.on_device import OnCuda
from ..support.operators import NamedOperators
from ..support.versions import OLD_TORCH

CPU = torch.device("cpu")
N = 24
RIGHT = torch.arange(N)[None] < torch.tensor([[N], [7], [13]])
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 15, 5]))[None]
EMPTY_ROW = RIGHT.clone()
EMPTY_ROW[1] = False
GATHERED = {
    "right padding": MaskStructure(3, N, N, key_padding=RIGHT),
    "right padding, causal": MaskStructure(3, N, N, causal=True, key_padding=RIGHT),
    "left padding, causal": MaskStructure(3, N, N, causal=True, key_padding=RIGHT.flip(1)),
    "keys alone are padded": MaskStructure(3, 5, N, key_padding=RIGHT),
    "padding of two rows": MaskStructure(2, N, N, key_padding=RIGHT[:2]),
    "holes": MaskStructure(2, N, N, key_padding=(torch.arange(N) % 3 > 0)[None] & RIGHT[:2]),
    "holes, and a row without keys": MaskStructure(3, 5, N, key_padding=(torch.arange(N) % 3 > 0) & EMPTY_ROW),
    "padding behind a past": MaskStructure(3, 5, N, causal=True, q_offset=N - 5, key_padding=RIGHT.flip(1)),
}
WHOLE = {
    "documents": MaskStructure(1, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "documents both ways": MaskStructure(1, N, N, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "chunks": MaskStructure(2, N, N, causal=True, chunk=10),
    "chunked prefill": MaskStructure(3, 5, N, causal=True, q_offset=N - 5),
}
REFUSED = {
    "window": MaskStructure(3, N, N, causal=True, window=5, key_padding=RIGHT),
    "holes, causal": MaskStructure(1, N, N, causal=True, key_padding=(torch.arange(N) % 3 > 0)[None]),
    "two rules": MaskStructure(3, 5, N, causal=True, q_offset=9, key_padding=RIGHT),
    "nothing to see": MaskStructure(1, N, N, key_padding=torch.zeros(1, N, dtype=torch.bool)),
}


def loop(query: Tensor, key: Tensor, value: Tensor, layout: Packed, scaling: float) -> Tensor:
    assert query.ndim == key.ndim == value.ndim == 3
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = []
    q_cuts, k_cuts = layout.q_borders.tolist(), layout.k_borders.tolist()
    for (a, b), (c, d) in zip(itertools.pairwise(q_cuts), itertools.pairwise(k_cuts), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[a:b], key[c:d]) * scaling
        i, j = torch.arange(b - a)[:, None], torch.arange(d - c)[None]
        hidden = {0: i < 0, 1: j > i, 2: j - (d - c) > i - (b - a)}[layout.rule]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=2)
        out.append(torch.einsum("hqk,khd->qhd", weights, value[c:d]))
    return torch.cat(out)


def draw(structure: MaskStructure, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, ...]:
    shapes = ((structure.q_len, heads, 8), (structure.kv_len, kv_heads, 8), (structure.kv_len, kv_heads, 16))
    made = (torch.randn(structure.batch, *shape, dtype=torch.float64) for shape in shapes)
    return tuple(t.transpose(1, 2).requires_grad_() for t in made)


@pytest.fixture
def walking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "walks_runs", lambda *_: True)
    monkeypatch.setattr(packed, "_efficient", loop)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", GATHERED | WHOLE)
def test_equals_reference(request: pytest.FixtureRequest, name: str, one_by_one: bool, gradient: bool) -> None:
    structure = (GATHERED | WHOLE)[name]
    layout = layout_of(structure, CPU)
    assert layout is not None
    if not one_by_one:
        request.getfixturevalue("walking")
    elif layout.rule > FROM_FIRST:
        pytest.skip("served in bands")
    q, k, v = draw(structure)
    truth = reference.attention(AttentionCall(q, k, v, structure, scaling=0.3)).out
    with torch.set_grad_enabled(gradient):
        out = packed_attention(q, k, v, layout, 0.3)
    torch.testing.assert_close(out, truth)
    if gradient:
        probe = torch.randn_like(out)
        for ours, theirs in zip(
            torch.autograd.grad(out, (q, k, v), probe), torch.autograd.grad(truth, (q, k, v), probe), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_what_covers_the_batch_is_not_gathered() -> None:
    for name, structure in (GATHERED | WHOLE).items():
        layout = structure.cached(layout_of, CPU)
        assert layout is not None
        assert (layout.queries is not None or layout.keys is not None) == (name in GATHERED)
        assert structure.cached(layout_of, CPU) is layout


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_has_no_rule_for(name: str) -> None:
    assert layout_of(REFUSED[name], CPU) is None


def test_kernels_of_other_vendors_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed.walks_runs("cuda", torch.half, 64, 64)
    assert not packed.walks_runs("cpu", torch.half, 64, 64)
    assert not packed.walks_runs("cuda", torch.float64, 64, 64)
    assert not packed.walks_runs("cuda", torch.half, 64, 12)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not packed.walks_runs("cuda", torch.half, 64, 64)


def spec_of(structure: MaskStructure, **changes: object) -> CallKind:
    q, k, v = (t.detach().float() for t in draw(structure))
    request = AttentionCall(q, k, v, structure, scaling=0.3)
    kind = request.checked_kind()
    seen = {"device": torch.device("cuda"), "features": kind.features | LOOKED}
    return kind._replace(**{**seen, **changes})  # type: ignore[arg-type]


@pytest.mark.usefixtures("walking")
def test_runs_that_end_with_their_keys_are_walked_where_a_kernel_can(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = GATHERED["padding behind a past"]
    q, k, v = (t.detach() for t in draw(structure))
    asked = AttentionCall(q, k, v, structure, scaling=0.3)
    torch.testing.assert_close(way_of(spec_of(structure))(asked), reference.attention(asked).out)
    for other in ({"device": torch.device("cpu")}, {"dtype": torch.float64}, {"head_dim": 6}):
        assert way_of(spec_of(structure, **other))(asked) is None
    windowed = REFUSED["window"]
    tensors = (t.detach() for t in draw(windowed))
    assert way_of(spec_of(windowed))(AttentionCall(*tensors, windowed, 0.3)) is None


@pytest.mark.parametrize(("dtype", "grouped"), [(torch.float32, False), (torch.bfloat16, True)])
def test_grouped_heads_are_repeated_where_the_fused_kernel_takes_none(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, grouped: bool
) -> None:
    asked: list[tuple[int, bool]] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, *rest: object, enable_gqa: bool, **more: object) -> Tensor:
        asked.append((key.shape[1], enable_gqa))
        return value

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    sizes = {"q": (6, 9, 8), "k": (2, 9, 8), "v": (2, 9, 4), "step": (6, 1, 8)}
    with FakeTensorMode():
        made = {name: torch.empty(2, *size, dtype=dtype, device="cuda") for name, size in sizes.items()}
        operator(made["q"], made["k"], made["k"], 0.3, causal=True)
        operator(made["q"], made["k"], made["v"], 0.3)
        operator(made["step"], made["k"], made["k"], 0.3)
    assert asked == [(2, True) if grouped else (6, False), (6, False), (2, True)]


@pytest.mark.skipif(OLD_TORCH, reason="torch before 2.7 asks the driver for fake tensors, too")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_on_cuda_goes_to_the_kernel_that_plans_nothing(dtype: torch.dtype, dropout: float) -> None:
    with FakeTensorMode(), NamedOperators() as noted:
        q, k = (torch.empty(2, heads, 16, 8, dtype=dtype, device="cuda") for heads in (6, 2))
        mask = torch.zeros(2, 1, 16, 16, dtype=dtype, device="cuda")
        assert operator(q, k, k, 0.3, mask, dropout=dropout).shape == (2, 6, 16, 8)
    named = "aten::_scaled_dot_product_efficient_attention" in noted.names
    assert named == (dtype != torch.float64 and not dropout)


def test_a_small_mask_is_made_once_per_pass() -> None:
    structure = GATHERED["left padding, causal"].with_changes()
    mask = structure.cached(additive_mask, torch.half, torch.device("cpu"))
    assert torch.equal(mask == 0, structure.visible())
    assert bool((mask[~structure.visible()] == float("-inf")).all())
    assert mask.stride(-2) % 16 == 0, "rows start where the kernel wants them"
    assert structure.cached(additive_mask, torch.half, torch.device("cpu")) is mask
    assert additive_mask(structure, torch.float32, torch.device("cpu")).dtype == torch.float32


def test_flash_serves_half_precision_aligned_to_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_has_flash", lambda device: True)
    square, behind = layout_of(WHOLE["documents"], CPU), layout_of(WHOLE["chunked prefill"], CPU)
    longer = layout_of(MaskStructure(3, N, N, causal=True, key_padding=RIGHT), CPU)
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


FLASH = "aten::_scaled_dot_product_flash_attention"


@pytest.fixture(params=[(9, 0)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "capability", lambda _: of_sm(request.param))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


def _step(kv_len: int = 40, seen: int = 40, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    query = torch.empty(3, 8, 1, dim, device="meta", dtype=dtype)
    key = torch.empty(3, 2, kv_len, dim, device="meta", dtype=dtype)
    structure = MaskStructure(3, 1, kv_len, causal=True, q_offset=seen - 1)
    call = AttentionCall(query, key, key, structure, 0.125)
    way = dispatch.way_of(call.checked_kind()._replace(device=torch.device("cuda")))
    with NamedOperators() as noted:
        out = way(call)
    assert out is not None
    assert out.shape == (3, 1, 8, dim)
    return list(noted.names)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("seen", [40, 17])
def test_a_step_is_one_call_of_the_flash_kernel(seen: int) -> None:
    names = _step(seen=seen)
    assert names.count(FLASH) == 1
    assert ("aten::slice" in names) == (seen < 40)


@pytest.mark.usefixtures("device")
def test_other_calls_are_left_to_torch() -> None:
    assert FLASH not in _step(dtype=torch.float32)
    assert FLASH not in _step(dim=20)
    assert FLASH not in _step(dim=512)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert FLASH not in _step()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("device", [(8, 0), (8, 9), (12, 0)], indirect=True)
def test_where_torch_takes_flash_by_itself_it_is_asked_plainly() -> None:
    assert FLASH not in _step()


def test_gradients_go_through_the_operator(device: None) -> None:
    query = torch.empty(1, 2, 1, 64, dtype=torch.float16, requires_grad=True)
    key = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    structure = MaskStructure(1, 1, 8, causal=True, q_offset=7)
    kind = AttentionCall(query, key, key, structure, 0.125).checked_kind()._replace(device=torch.device("cuda"))
    assert kind.needs_grad
    assert not kernels.steps_by_flash(kind)
    assert kernels.steps_by_flash(kind._replace(features=kind.features & ~GRAD))


CAP, SCALING = 5.0, 0.25


def stock(call: AttentionCall) -> torch.Tensor:
    """As Transformers' eager attention writes Gemma 2's scores, in the dtype of the model."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (call.key, call.value))
    scores = torch.tanh(call.query @ key.transpose(2, 3) * SCALING / CAP) * CAP
    scores = scores + torch.full(scores.shape[2:], float("-inf")).triu(1).to(scores.dtype)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def test_err_no_more_than_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, 90, 32, generator=g).bfloat16() for h in (4, 2, 2))
    structure = MaskStructure(2, 90, 90, causal=True)
    call = AttentionCall(query, key, value, structure, SCALING, softcap=CAP)
    products: list[torch.dtype] = []
    matmul = torch.matmul

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        products.append(a.dtype)
        return matmul(a, b)

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "matmul", noted)
    truth = reference.attention(call).out.transpose(1, 2)
    products.clear()
    errors = {}
    for where, there in (("device", query.as_subclass(OnCuda)), ("processor", query)):
        out = masked.masked_call(call, there, key, value, structure.visible())
        errors[where] = (out.double() - truth).abs().max()
    assert products == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    assert errors["processor"] <= errors["device"] <= 2 * (stock(call).double() - truth).abs().max()
