"""Calls that no caller should make: refused in words, or served as torch serves them, never read blind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.native import launch, library, ops, storing
from adaattn_hf.backends.native.library import missing
from adaattn_hf.backends.native.rules import Rules
from adaattn_hf.patches.call.interface import attention_function

from ..support.calls import ON_CPU

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")
B, H, KV, Q, K, D = 2, 4, 2, 5, 9, 16


def tensors(**shapes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    drawn = {"query": (B, H, Q, D), "key": (B, KV, K, D), "value": (B, KV, K, D), **shapes}
    query, key, value = (torch.randn(drawn[name], generator=source) for name in ("query", "key", "value"))
    return query, key, value


def freed() -> Tensor:
    """A key behind the start of storage that was freed, as sharded training leaves it between layers."""
    whole = torch.randn(7 + B * KV * K * D)
    key = whole[7:].view(B, KV, K, D)
    whole.untyped_storage().resize_(0)
    return key


def fake(*shape: int) -> Tensor:
    """A tensor of a tracer, with a shape and no memory."""
    with FakeTensorMode():
        return torch.randn(shape)


MALFORMED: dict[str, Callable[[], tuple[Tensor, Tensor, Tensor, Rules]]] = {
    "meta key": lambda: (tensors()[0], tensors()[1].to("meta"), tensors()[2], Rules()),
    "fake key": lambda: (tensors()[0], fake(B, KV, K, D), tensors()[2], Rules()),
    "freed key": lambda: (tensors()[0], freed(), tensors()[2], Rules()),
    "sparse value": lambda: (*tensors()[:2], tensors()[2].to_sparse(), Rules()),
    "mask of other heads": lambda: (*tensors(), Rules(mask=torch.ones(B, 2, Q, K, dtype=torch.bool))),
    "mask of other rows": lambda: (*tensors(), Rules(mask=torch.ones(3, 1, Q, K, dtype=torch.bool))),
    "mask of other keys": lambda: (*tensors(), Rules(mask=torch.ones(1, 1, 1, K - 1, dtype=torch.bool))),
    "mask of bytes": lambda: (*tensors(), Rules(mask=torch.ones(1, 1, 1, K, dtype=torch.uint8))),
    "bias of other rows": lambda: (*tensors(), Rules(bias=torch.zeros(3, 1, Q, K))),
    "bias in double": lambda: (*tensors(), Rules(bias=torch.zeros(B, 1, Q, K, dtype=torch.float64))),
    "sinks of few heads": lambda: (*tensors(), Rules(sink_logits=torch.zeros(H - 1))),
    "sinks with strides": lambda: (*tensors(), Rules(sink_logits=torch.zeros(2 * H)[::2])),
    "sinks in half": lambda: (*tensors(), Rules(sink_logits=torch.zeros(H, dtype=torch.float16))),
    "windows of few heads": lambda: (*tensors(), Rules(head_windows=torch.ones(1, dtype=torch.int64))),
    "windows in int32": lambda: (*tensors(), Rules(head_windows=torch.ones(KV, dtype=torch.int32))),
    "small key mean": lambda: (*tensors(), Rules(key_mean=torch.zeros(1, KV, 2))),
    "key mean of one axis": lambda: (*tensors(), Rules(key_mean=torch.zeros(3))),
    "meta key mean": lambda: (*tensors(), Rules(key_mean=torch.zeros(1, KV, D, device="meta"))),
    "segments outside": lambda: (*tensors(), Rules(segments=torch.tensor([[0, 0, Q, 0, K + 1, 0]]))),
    "segments of queries that are not": lambda: (*tensors(), Rules(segments=torch.tensor([[0, 2, Q, 0, K, 0]]))),
    "segments of a row that is not": lambda: (*tensors(), Rules(segments=torch.tensor([[B, 0, Q, 0, K, 0]]))),
    "segments of five": lambda: (*tensors(), Rules(segments=torch.zeros(1, 5, dtype=torch.int64))),
    "segments far off": lambda: (*tensors(), Rules(segments=torch.tensor([[0, 0, Q, 0, K, 1 << 62]]))),
    "an offset beyond reason": lambda: (*tensors(), Rules(causal=True, offset=(1 << 63) - 1)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_refused_in_words(name: str) -> None:
    query, key, value, rules = MALFORMED[name]()
    with pytest.raises((ValueError, RuntimeError), match=r"got|inconsistent extents"):
        launch.forward(query, key, value, 0.25, rules)


@pytest.mark.parametrize("shapes", [
    {"key": (B, 3, K, D), "value": (B, 3, K, D)}, {"key": (B, 0, K, D), "value": (B, 0, K, D)},
    {"value": (B, 1, K, D)}, {"key": (B, KV, K, D + 1)}, {"value": (B, KV, K + 1, D)},
    {"key": (3, KV, K, D)}, {"query": (H, Q, D)},
])  # fmt: skip
def test_the_operators_refuse_what_does_not_belong_together(shapes: dict[str, tuple[int, ...]]) -> None:
    out, lse = torch.zeros(B, Q, H, D), torch.zeros(B, H, Q)
    fits = MaskStructure(B, Q, K).operands()
    asked = *tensors(**shapes), None, None, 0.25, *(None,) * 5, *fits
    with pytest.raises((ValueError, IndexError), match=r"got|out of range"):
        ops.attend_op(*asked)
    with pytest.raises((ValueError, IndexError), match=r"got|out of range"):
        ops.backward_op(False, out, out, lse, *asked)


@pytest.mark.parametrize("name", ["mask of other rows", "freed key", "small key mean"])
def test_the_backward_refuses_them_as_well(name: str) -> None:
    query, key, value, rules = MALFORMED[name]()
    out, lse = torch.zeros(B, Q, H, D), torch.zeros(B, H, Q)
    with pytest.raises((ValueError, RuntimeError), match=r"got|inconsistent extents"):
        launch.backward(out, (query, key, value, out, lse), 0.25, rules)
    query, key, value = tensors()
    for grad, bad in ((torch.zeros(B, Q, H, D + 1), lse), (out, torch.zeros(B, H, Q + 1)), (out, lse.double())):
        with pytest.raises(ValueError, match=r"got shape|got torch"):
            launch.backward(grad, (query, key, value, out, bad), 0.25)


def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=0.25, enable_gqa=True).transpose(1, 2)


def test_numbers_that_are_not_in_memory_are_written_out() -> None:
    query, key, value = tensors()
    turned = torch.complex(torch.zeros_like(query), query).conj()
    for odd in (turned.imag, nn.Parameter(query), torch._efficientzerotensor(query.shape)):
        out, _ = launch.forward(odd, key, value, 0.25)
        assert out is not None
        torch.testing.assert_close(out, stock(odd.detach() + 0, key, value))


class Marked(Tensor):
    """A subclass that only carries a name, as those of data pipelines do."""


def test_subclasses_with_memory_are_served() -> None:
    given = tensors()
    marked = [t.as_subclass(Marked) for t in given]  # type: ignore[arg-type]
    for backend in (None, "native"):
        out, _ = attention_function(backend)(nn.Module(), *marked, None, scaling=0.25)
        torch.testing.assert_close(torch.as_tensor(out).as_subclass(Tensor), stock(*given))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [None, "native", "sdpa", "eager"])
@pytest.mark.parametrize("single", ["query", "key", "value", "key and value"])
def test_a_batch_of_one_holds_for_every_row(backend: str | None, single: str) -> None:
    function = attention_function(backend)
    named = dict(zip(("query", "key", "value"), tensors(), strict=True))
    named = {name: t[:1] if name in single else t for name, t in named.items()}
    leaves = {name: t.clone().requires_grad_() for name, t in named.items()}
    out, _ = function(nn.Module(), *named.values(), None, scaling=0.25)
    torch.testing.assert_close(out, stock(*(t.expand(B, -1, -1, -1) for t in named.values())))
    ours, _ = function(nn.Module(), *leaves.values(), None, scaling=0.25)
    theirs = stock(*(t.expand(B, -1, -1, -1) for t in leaves.values()))
    for a, b in zip(
        torch.autograd.grad(ours.square().sum(), list(leaves.values())),
        torch.autograd.grad(theirs.square().sum(), list(leaves.values())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_other_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="got batches of 2, 3 and 3"):
        attention_function()(nn.Module(), *tensors(key=(3, KV, K, D), value=(3, KV, K, D)), None)


@pytest.mark.parametrize("shape", [(2, 1, Q, K), (1, 2, Q, K), (B, H, 2, K), (B, 1, Q, K - 2), (2, K), (3, K - 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_does_not_fit_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    query, key, value = tensors(query=(3, H, Q, D), key=(3, KV, K, D), value=(3, KV, K, D))
    with pytest.raises(ValueError, match="attention_mask: got shape"):
        attention_function()(nn.Module(), query, key, value, torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("shape", [(3, 1, Q, K), (1, 2, Q, K), (B, H, 2, K), (B, 1, Q, K - 2), (B, 1, Q, K, 1), (Q, K)])
def test_a_structure_whose_mask_does_not_fit_is_refused_on_every_way(shape: tuple[int, ...]) -> None:
    """Kernels read a mask by its strides; a launch of its kind is no reason not to look."""
    query, key, value = tensors(query=(B, H, Q, D), key=(B, KV, K, D), value=(B, KV, K, D))
    fits, other = (MaskStructure(B, Q, K, mask=torch.ones(s, dtype=torch.bool)) for s in ((B, 1, Q, K), shape))
    for backend in (None, *ON_CPU):
        good, bad = (AttentionCall(query, key, value, structure, 0.25) for structure in (fits, other))
        select.attend(good, backend)
        for ask in (bad.check, partial(select.attend, bad, backend)):
            with pytest.raises(ValueError, match=r"structure\.mask: got shape .*, expected one that broadcasts"):
                ask()


def test_tensors_of_a_tracer_go_to_operations_of_torch() -> None:
    with FakeTensorMode():
        query, key, value = tensors()
        for mask in (None, torch.ones(B, 1, Q, K, dtype=torch.bool), torch.ones(B, K, dtype=torch.bool)):
            out, _ = attention_function()(nn.Module(), query, key, value, mask)
            assert out.shape == (B, Q, H, D)
            assert type(out) is type(query)
    with pytest.raises(select.BackendRefusal, match="read memory"):
        attention_function("native")(nn.Module(), query, key, value, None)


def test_a_mode_that_makes_tensors_without_memory_is_noticed() -> None:
    query, key, value = tensors()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="no memory to write to"):
        launch.forward(query, key, value, 0.25)


@pytest.mark.parametrize("scaling", [0.0, -0.5])
def test_any_factor_on_the_scores_leaves_hidden_keys_hidden(scaling: float) -> None:
    query, key, value = (t.requires_grad_() for t in tensors(query=(B, H, K, D)))
    structure = MaskStructure(B, K, K, causal=True)
    results = []
    for name in ("native", "eager"):
        out = select.attend(AttentionCall(query, key, value, structure, scaling), name).out
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_windows_and_sinks_beyond_any_length_are_none() -> None:
    query, key, value = tensors(query=(B, H, K, D))
    far = MaskStructure(B, K, K, causal=True, window=1 << 70, sinks=1 << 70)
    plain = MaskStructure(B, K, K, causal=True)
    outs = [select.attend(AttentionCall(query, key, value, s, 0.25), "native").out for s in (far, plain)]
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("q_len", [1, K])
def test_one_score_may_be_as_large_as_numbers_are(q_len: int) -> None:
    """Its row is that key's value; rounded once, its distance from the maximum would be far from 0."""
    query, key, value = tensors(query=(B, H, q_len, D))
    bias = torch.zeros(1, 1, q_len, K)
    for large in (1e10, 1e20, 1e37):
        bias[0, 0, -1, 3] = large
        call = AttentionCall(query, key, value, MaskStructure(B, q_len, K), 0.25, bias=bias)
        out = select.attend(call, "native").out
        torch.testing.assert_close(out[:, -1], value[:, :, 3].repeat_interleave(H // KV, 1))


@pytest.mark.parametrize("backend", ["native", "sdpa", "eager"])
@pytest.mark.parametrize("rules", [{}, {"window": 3}, {"window": 3, "sinks": 1}, {"padding": True}, {"mask": True}])
def test_the_default_device_changes_nothing(backend: str, rules: dict[str, Any]) -> None:
    """Tables made on another device were read as no table at all: padding, for one, was not hidden."""
    results = []
    for device in ("cpu", "meta"):
        drawn = tensors(query=(B, H, K, D))
        padding, mask = torch.arange(K) > torch.tensor([[0], [4]]), torch.eye(K, dtype=torch.bool)[None, None]
        named = {"padding": {"key_padding": padding}, "mask": {"mask": mask}}
        asked = next((named[name] for name in rules if name in named), rules)
        with torch.device(device):
            structure = MaskStructure(B, K, K, **{"causal": True, **asked})  # type: ignore[arg-type]
            query, key, value = (t.requires_grad_() for t in drawn)
            out = select.attend(AttentionCall(query, key, value, structure, 0.25), backend).out
            results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    for ours, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, expected)


def test_without_the_library_every_way_in_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors()
    out, lse = launch.forward(query, key, value, 0.25, Rules(), need_lse=True)
    assert out is not None
    assert lse is not None
    codes, scale = torch.zeros(B, KV, K, D, dtype=torch.int8), torch.zeros(B, KV, K, dtype=torch.uint8)
    monkeypatch.setattr(library, "library", lambda: None)
    monkeypatch.setattr(library, "missing", lambda: ("it was never built here",))
    for way in (
        lambda: launch.forward(query, key, value, 0.25, Rules()),
        lambda: launch.backward(torch.zeros_like(out), (query, key, value, out, lse), 0.25),
        lambda: storing.store(key, codes, scale),
    ):
        with pytest.raises(RuntimeError, match="native backend: it was never built here"):
            way()


def test_a_rule_that_is_negated_lazily_is_refused() -> None:
    sinks = torch._neg_view(torch.ones(H))
    with pytest.raises(ValueError, match="sink_logits: got a lazily negated or zero tensor, expected numbers"):
        launch.forward(*tensors(), 0.25, Rules(sink_logits=sinks))
