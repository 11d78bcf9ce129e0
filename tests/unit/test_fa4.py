"""flash-attn 4's lists of blocks against the definition of a structure, and its masks run as plain torch."""

import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import ALL
from adaattn_hf.attention.kind import (
    BIAS,
    COMPILING,
    DROPOUT,
    GRAD,
    HEAD_INT8,
    HEAD_WINDOWS,
    LSE,
    ONE_QUERY,
    SOFTCAP,
    STORED,
    WINDOW,
    WINDOW_SINKS,
)
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import capability as capability_module
from adaattn_hf.backends.capability import of_sm
from adaattn_hf.backends.flash import Flash4Backend

from ..support.calls import attended
from ..support.head_rules import rules
from .test_triton import interpreted

N = 300
LEFT = torch.ones(3, N, dtype=torch.bool)
LEFT[0, :150] = False
LEFT[1] = False
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 40, 160]))[None]
STRUCTURES = {
    "causal": MaskStructure(3, N, N, causal=True),
    "full": MaskStructure(2, N, N),
    "suffix": MaskStructure(2, 140, N, causal=True, q_offset=160),
    "static cache": MaskStructure(2, 20, N, causal=True, q_offset=torch.tensor(140)),
    "few sinks": MaskStructure(2, N, N, causal=True, window=90, sinks=3),
    "left padding": MaskStructure(3, N, N, causal=True, key_padding=LEFT),
    "documents": MaskStructure(1, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "documents both ways": MaskStructure(1, N, N, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
}
RULES = {"every second head": rules((0, 70), (0, 5)), "all heads": rules((150, 260), (2, 200))}


class Lane(Tensor):
    """A row of numbers where the package has one number per lane."""

    def __getitem__(self, index: Any) -> Any:
        return self


class Stand:
    """`flash_attn.cute`, in plain torch: it walks the lists and asks the mask, as the kernels do."""

    def __init__(self) -> None:
        self.module = types.ModuleType("flash_attn.cute")
        self.module.flash_attn_func = self.dense  # type: ignore[attr-defined]
        self.module.flash_attn_varlen_func = self.varlen  # type: ignore[attr-defined]
        self.tiles = 0

    def dense(self, q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        lists, mask = kw.pop("block_sparse_tensors", None), kw.pop("mask_mod", None)
        heads, kv_heads = q.shape[2], k.shape[2]
        batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
        if lists is None:
            left, right = kw["window_size"]
            window = None if left is None else left + 1
            assert right == (None if left is None else 0 if kw["causal"] else left)
            shown = MaskStructure(batch, q_len, kv_len, kw["causal"], kv_len - q_len, window)
            visible = shown.visible().expand(batch, heads, q_len, kv_len)
        else:
            visible = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
            lengths = types.SimpleNamespace(seqlen_q=q_len, seqlen_k=kv_len)
            some_n, some, every_n, every = (t.expand(batch, *t.shape[1:]) for t in lists[:4])
            block = lists[4][1]
            for b in range(batch):
                for h in range(heads):
                    for m in range(some.shape[2]):
                        rows = torch.arange(128 * m, min(128 * m + 128, q_len))
                        for n in every[b, h, m, : every_n[b, h, m]].tolist():
                            visible[b, h, rows, block * n : block * n + block] = True
                        for n in some[b, h, m, : some_n[b, h, m]].tolist():
                            self.tiles += 1
                            keys = torch.arange(block * n, min(block * n + block, kv_len))
                            seen = mask(
                                [b], [h], rows[:, None].as_subclass(Lane), keys[None].as_subclass(Lane),
                                lengths, kw["aux_tensors"],
                            )  # fmt: skip
                            visible[b, h, rows[:, None], keys[None]] |= seen.as_subclass(Tensor)
        structure = MaskStructure(batch, q_len, kv_len, mask=visible)
        made = reference.attention(
            AttentionCall(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), structure, kw["softmax_scale"],
                softcap=kw["softcap"] or None, sink_logits=kw["learnable_sink"],
            )
        )  # fmt: skip
        assert heads % kv_heads == 0
        return made.out.to(q.dtype), made.lse.float() if kw["return_lse"] else None

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        cu_q, cu_k = kw.pop("cu_seqlens_q").tolist(), kw.pop("cu_seqlens_k").tolist()
        assert kw.pop("max_seqlen_q") == max(b - a for a, b in itertools.pairwise(cu_q))
        kw.pop("max_seqlen_k")
        parts = [
            self.dense(q[None, a:b], k[None, c:d], v[None, c:d], **kw)[0][0]
            for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True)
        ]
        return torch.cat(parts), None


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """The package and the compiler's names that the masks import."""
    made = Stand()
    cutlass, utils = types.ModuleType("cutlass"), types.ModuleType("flash_attn.cute.utils")
    sparsity = types.ModuleType("flash_attn.cute.block_sparsity")
    cutlass.cute = types.SimpleNamespace(jit=lambda f: f)  # type: ignore[attr-defined]
    cutlass.Int32 = int  # type: ignore[attr-defined]
    utils.scalar_to_ssa = lambda value, kind: value  # type: ignore[attr-defined]
    sparsity.BlockSparseTensorsTorch = lambda *tables, block_size: (*tables, block_size)  # type: ignore[attr-defined]
    for module in (cutlass, utils, sparsity, made.module):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    yield made
    sys.modules.pop("adaattn_hf.backends.flash.fa4_mask", None)


def make(structure: MaskStructure, **extra: Any) -> AttentionCall:
    g = torch.Generator().manual_seed(0)

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(structure.batch, length, heads, 16, generator=g).half().transpose(1, 2)

    n, m = structure.q_len, structure.kv_len
    return AttentionCall(draw(n, 4), draw(m, 2), draw(m, 2), structure, scaling=0.3, **extra)


def check(call: AttentionCall) -> None:
    result, truth = attended("fa4", call), reference.attention(call)
    torch.testing.assert_close(result.out.double(), truth.out, atol=4e-3, rtol=0)
    if call.need_lse:
        assert result.lse is not None
        torch.testing.assert_close(result.lse.double(), truth.lse, atol=2e-3, rtol=0)


@interpreted
@pytest.mark.parametrize("rule", [None, *RULES])
@pytest.mark.parametrize("name", STRUCTURES)
def test_equals_reference(stand: Stand, name: str, rule: str | None) -> None:
    check(make(STRUCTURES[name], per_head=None if rule is None else RULES[rule]))


@interpreted
def test_blocks_that_are_seen_whole_ask_no_mask(stand: Stand) -> None:
    """Three blocks of queries, two heads: the diagonal, and what a window's border cuts."""
    made = make(MaskStructure(1, 384, 384, causal=True), per_head=rules((0, 256)))
    check(made)
    assert stand.tiles == 2 * 3 + 2 * (3 + 1)


@interpreted
def test_lists_are_made_once_for_layers_of_equal_rules(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaattn_hf.backends.flash import fa4_lists

    made: list[Any] = []
    real = fa4_lists.make_lists

    def counted(*args: Any) -> Any:
        made.append(args)
        return real(*args)

    monkeypatch.setattr(fa4_lists, "make_lists", counted)
    structure = MaskStructure(1, N, N, causal=True)
    call = make(structure, per_head=rules((0, 70)))
    check(call)
    call.per_head = rules((0, 70))
    check(call)
    assert len(made) == 1
    with torch.inference_mode():  # the next pass, which shares the structure of one without tensors
        check(make(structure, per_head=rules((0, 70))))
    assert len(made) == 1
    check(make(structure, per_head=rules((0, 71))))
    check(make(MaskStructure(1, N - 1, N - 1, causal=True), per_head=rules((0, 70))))
    assert len(made) == 3


@interpreted
@pytest.mark.parametrize("padded", [False, True])
def test_lists_made_in_inference_mode_serve_gradients(stand: Stand, padded: bool) -> None:
    from adaattn_hf.backends.flash import fa4_lists

    padding = torch.arange(N)[None] >= 9 if padded else None
    structure = MaskStructure(1, N, N, causal=True, key_padding=padding)
    with torch.inference_mode():
        check(make(structure, per_head=rules((0, 70))))
        asked = structure, torch.device("cpu"), ((ALL, 0), (70, 16)), 2, N, not padded
        (lists, tables, _), turned = fa4_lists.make_lists(*asked), fa4_lists.turned_lists(*asked)
    assert not any(t.is_inference() for t in (*lists, *tables, *turned))


@interpreted
@pytest.mark.parametrize(
    "extra",
    [{"softcap": 1.5}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"need_lse": True}],
    ids=["softcap", "sinks", "lse"],
)
def test_other_mathematics(stand: Stand, extra: dict[str, Any]) -> None:
    for name in ("causal", "few sinks"):
        check(make(STRUCTURES[name], **extra))


CUDA = torch.device("cuda")
REFUSALS: dict[str, tuple[int, dict[str, Any]]] = {
    "run on CUDA": (0, {"device": torch.device("cpu")}), "float16 or bfloat16": (0, {"dtype": torch.float32}),
    "up to 128": (HEAD_WINDOWS, {"head_dim": 192, "head_dim_v": 192}),
    "multiples of 8": (0, {"head_dim": 20, "head_dim_v": 20}), "the keys of one query": (ONE_QUERY | HEAD_WINDOWS, {}),
    "stored as codes": (STORED, {}), "additive bias": (BIAS, {}), "dense mask": (0, {"shape": "irregular"}),
    "no dropout": (DROPOUT, {}), "through a softcap": (SOFTCAP | GRAD, {}),
    "not put back": (LSE, {"shape": "ragged"}), "traced": (COMPILING, {}), "no int8 products": (HEAD_INT8, {}),
}  # fmt: skip


def found(name: str) -> ModuleSpec:
    return ModuleSpec(name, None, origin=f"{name}/__init__.py")


@pytest.mark.parametrize("reason", REFUSALS)
def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(capability_module, "capability", lambda _: of_sm((9, 0)))
    kind, (features, changes) = make(STRUCTURES["causal"]).checked_kind()._replace(device=CUDA), REFUSALS[reason]
    backend = Flash4Backend()
    assert backend.refusals(kind) == ()
    assert any(reason in r for r in backend.refusals(kind._replace(features=kind.features | features, **changes)))


def test_lists_need_triton_and_dense_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability_module, "capability", lambda _: of_sm((9, 0)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    kind, backend = make(STRUCTURES["causal"]).checked_kind()._replace(device=CUDA), Flash4Backend()
    assert backend.missing() == backend.refusals(kind) == ()
    for listed in (HEAD_WINDOWS, WINDOW | WINDOW_SINKS):
        (reason,) = backend.refusals(kind._replace(features=kind.features | listed))
        assert reason == "lists of blocks are made by Triton kernels, and triton is not installed"


@pytest.mark.parametrize(("sm", "served"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_serves_devices_that_it_was_written_for(monkeypatch: pytest.MonkeyPatch, sm: Any, served: bool) -> None:
    monkeypatch.setattr(capability_module, "capability", lambda _: of_sm(sm))
    kind = make(STRUCTURES["causal"]).checked_kind()._replace(device=CUDA)
    assert (Flash4Backend().refusals(kind) == ()) is served


@pytest.mark.parametrize("lacking", ["cutlass", "quack"])
def test_says_when_the_package_was_not_installed_whole(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacking else found(name))
    (reason,) = Flash4Backend().missing()
    assert f"not installed whole (no module {lacking})" in reason


def test_a_compiler_of_which_only_libraries_are_there_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie in its directory, from a wheel of their own: `import cutlass` works, `cutlass.cute` is missing."""

    def find(name: str) -> ModuleSpec:
        return ModuleSpec(name, None, is_package=True) if name == "cutlass" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    (reason,) = Flash4Backend().missing()
    assert "not installed whole (no module cutlass)" in reason


def test_says_when_the_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "flash-attn-4 is not installed" in Flash4Backend().missing()[0]
