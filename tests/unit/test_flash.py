"""The flash-attn backend against a stand-in that keeps flash-attn's conventions, over the reference.

The stand-in aligns causality and windows to the last key, as the package documents; real kernels are compared in
`tests/gpu` where they are installed, which flash-attn 2 and the whole of 3 never were.
"""

import importlib.machinery
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.kind import BIAS, COMPILING, DROPOUT, GRAD, LSE, SINKS, WINDOW, WINDOW_SINKS, CallKind
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.base import Backend
from adaattn_hf.backends.flash import FA2, FA3, FA3_FWD, Flash4Backend, FlashBackend
from adaattn_hf.backends.select import BACKENDS, order
from adaattn_hf.backends.triton import TritonBackend

from ..support.calls import attended, call_over


def by_definition(q: Tensor, k: Tensor, v: Tensor, kw: dict[str, Any], endless: int | None = -1) -> AttentionResult:
    """The package's mathematics on `[batch, length, heads, head_dim]`: the last query stands at the last key."""
    left, right = kw["window_size"]
    assert right == (0 if left != endless and kw["causal"] else left)
    window = None if left == endless else left + 1
    structure = MaskStructure(len(q), q.shape[1], k.shape[1], kw["causal"], k.shape[1] - q.shape[1], window)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    more = {"softcap": kw["softcap"] or None, "sink_logits": kw.get("learnable_sink")}
    return reference.attention(AttentionCall(q, k, v, structure, kw["softmax_scale"], **more))


def run_by_run(dense: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, kw: dict[str, Any]) -> Tensor:
    """The packed kernel's output, by what a dense one gives for each run between two borders."""
    borders = [kw.pop("cu_seqlens_q"), kw.pop("cu_seqlens_k")]
    for cut, most in zip(borders, (kw.pop("max_seqlen_q"), kw.pop("max_seqlen_k")), strict=True):
        assert (cut.dtype, int(cut.diff().max())) == (torch.int32, most)
    runs = zip(*(itertools.pairwise(cut.tolist()) for cut in borders), strict=True)
    return torch.cat([dense(q[None, a:b], k[None, c:d], v[None, c:d], **kw)[0] for (a, b), (c, d) in runs])


def stand_in(name: str, *, version: int, with_lse: bool = False) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.calls = []  # type: ignore[attr-defined]

    def check(keywords: dict[str, Any]) -> dict[str, Any]:
        allowed = {"softmax_scale", "causal", "window_size", "softcap", "return_attn_probs"}
        allowed |= {"dropout_p"} if version == 2 else {"num_splits"}
        assert set(keywords) <= allowed, f"flash-attn {version} knows no {set(keywords) - allowed}"
        module.calls.append(keywords)  # type: ignore[attr-defined]
        return keywords

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        made = by_definition(q, k, v, check(kw))
        out = made.out.to(q.dtype)
        return (out, made.lse.float()) if kw.get("return_attn_probs") or with_lse else out

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        return run_by_run(flash_attn_func, q, k, v, kw)

    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


@pytest.fixture(params=[FA2, FA3], ids=lambda v: v.name)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashBackend:
    backend: FlashBackend = request.param
    monkeypatch.setitem(sys.modules, backend.module, stand_in(backend.module, version=backend.version))
    return backend


def make(structure: MaskStructure, **extra: Any) -> AttentionCall:
    return call_over(structure, 8, **extra)


PADDING = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
NOTHING = torch.zeros(1, 4, dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
STRUCTURES = {
    "full": MaskStructure(2, 5, 9),
    "causal": MaskStructure(2, 7, 7, causal=True),
    "suffix": MaskStructure(2, 3, 9, causal=True, q_offset=6),
    "cache longer than the prompt": MaskStructure(2, 3, 9, causal=True, q_offset=2),
    "window": MaskStructure(2, 7, 7, causal=True, window=3),
    "window, both ways": MaskStructure(2, 7, 7, window=3),
    "decode": MaskStructure(2, 1, 9, causal=True, q_offset=8),
    "left padding": MaskStructure(2, 7, 7, causal=True, key_padding=PADDING),
    "right padding": MaskStructure(2, 7, 7, causal=True, key_padding=PADDING.flip(1)),
    "right padding, many more queries": MaskStructure(
        2, 3, 7, causal=True, q_offset=4, key_padding=PADDING.flip(1) & (torch.arange(7) < 4)
    ),
    "right padding, encoder": MaskStructure(2, 7, 7, key_padding=PADDING.flip(1)),
    "cross-attention": MaskStructure(2, 4, 7, key_padding=PADDING),
    "documents": MaskStructure(1, 7, 7, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "documents, window": MaskStructure(1, 7, 7, causal=True, window=2, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "chunks": MaskStructure(2, 7, 7, causal=True, chunk=3),
    "nothing to see": MaskStructure(1, 4, 4, causal=True, key_padding=torch.zeros(1, 4, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_equals_reference(backend: FlashBackend, name: str) -> None:
    call = make(STRUCTURES[name])
    out = attended(backend, call).out
    torch.testing.assert_close(out, reference.attention(call).out.float(), atol=1e-5, rtol=1e-5)


def test_places_that_were_found_in_inference_mode_serve_gradients(backend: FlashBackend) -> None:
    call = make(STRUCTURES["right padding"].with_changes())
    with torch.inference_mode():
        attended(backend, call)
    call.query.requires_grad_()
    out = attended(backend, call).out
    theirs = torch.autograd.grad(reference.attention(call).out.sum(), call.query)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), call.query), theirs)


def test_softcap_and_lse(backend: FlashBackend) -> None:
    call = make(STRUCTURES["causal"], softcap=0.5, need_lse=True)
    result, truth = attended(backend, call), reference.attention(call)
    torch.testing.assert_close(result.out, truth.out.float(), atol=1e-5, rtol=1e-5)
    assert result.lse is not None
    torch.testing.assert_close(result.lse, truth.lse.float(), atol=1e-5, rtol=1e-5)


def test_dropout_reaches_version_2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stand_in(FA2.module, version=2)
    monkeypatch.setitem(sys.modules, FA2.module, module)
    attended(FA2, make(STRUCTURES["causal"], dropout=0.25))
    assert module.calls[-1]["dropout_p"] == 0.25


def test_a_tuple_without_being_asked_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FA3.module, stand_in(FA3.module, version=3, with_lse=True))
    result = attended(FA3, make(STRUCTURES["causal"]))
    assert result.out.shape == (2, 7, 4, 8)
    assert result.lse is None


def kind(*features: int, **changes: Any) -> CallKind:
    base = make(STRUCTURES["causal"]).checked_kind()._replace(device=torch.device("cuda"), dtype=torch.bfloat16)
    return base._replace(features=base.features | sum(features), **changes)


REFUSALS: dict[str, CallKind] = {
    "CUDA": kind(device=torch.device("cpu")), "float16 or bfloat16": kind(dtype=torch.float32),
    "up to 256": kind(head_dim=264, head_dim_v=264), "multiples of 8": kind(head_dim=12, head_dim_v=12),
    "equal head sizes": kind(head_dim_v=16), "additive bias": kind(BIAS), "learned sinks": kind(SINKS),
    "sink tokens": kind(WINDOW | WINDOW_SINKS, shape="window"), "dense mask": kind(shape="irregular"),
    "traced": kind(COMPILING, shape="ragged"), "log-sum-exp": kind(LSE, shape="ragged"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSALS)
@pytest.mark.parametrize("flash", [FA2, FA3], ids=lambda flash: flash.name)
def test_refuses_with_the_reason(flash: FlashBackend, reason: str) -> None:
    assert flash.refusals(kind()) == ()
    assert any(reason in r for r in flash.refusals(REFUSALS[reason]))


def test_version_3_refuses_dropout() -> None:
    assert "flash-attn's kernels have no dropout" in FA3.refusals(kind(DROPOUT))
    assert FA2.refusals(kind(DROPOUT)) == ()


def test_reads_what_a_build_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = types.ModuleType("fa3_fwd_config")
    flags.__spec__ = importlib.machinery.ModuleSpec("fa3_fwd_config", None)
    left_out = ("BACKWARD", "LOCAL", "FP16")
    flags.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{n}": True for n in left_out}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", flags)
    assert FA3_FWD.refusals(kind()) == ()
    assert any("backward" in r for r in FA3_FWD.refusals(kind(GRAD)))
    assert any("windows" in r for r in FA3_FWD.refusals(kind(WINDOW, shape="window")))
    assert any("float16" in r for r in FA3_FWD.refusals(kind(dtype=torch.float16)))


def test_says_what_is_not_installed() -> None:
    lacking = FlashBackend("fa9", 3, "no_such_module_anywhere", "flash-attn 9", ((9, 0), (10, 0)))
    assert lacking.missing() == ("flash-attn 9 is not installed (no module no_such_module_anywhere)",)


@pytest.mark.parametrize("flash", [FA2, FA3, Flash4Backend()], ids=lambda flash: flash.name)
def test_runs_that_packed_kernels_cannot_say_are_refused(flash: Backend) -> None:
    def reasons(structure: MaskStructure, *, look: bool = True) -> str:
        asked = make(structure).checked_kind(named=look)
        return " ".join(flash.refusals(asked._replace(device=torch.device("cuda"), dtype=torch.bfloat16)))

    short = torch.tensor([[True, True, False, False]])
    rows = MaskStructure(1, 4, 4, causal=True, key_padding=short)
    windowed = rows.with_changes(window=2)
    assert "behind the last key" in reasons(windowed)
    assert "behind the last key" in reasons(windowed.with_changes(causal=False))
    assert "behind the last key" not in reasons(rows)
    assert "behind the last key" not in reasons(windowed.with_changes(key_padding=short.flip(1)))
    step = MaskStructure(1, 1, 4, causal=True, q_offset=3, key_padding=short.flip(1))
    assert "nobody has looked" in reasons(step, look=False)
    assert "nobody has looked" not in reasons(step)


def test_a_step_with_gradients_over_padding_that_nobody_looked_at_is_left_to_torch() -> None:
    holes = torch.tensor([[True, False, True, True]])
    call = make(MaskStructure(1, 1, 4, causal=True, q_offset=3, key_padding=holes))
    plain = call.checked_kind()._replace(device=torch.device("cuda"), dtype=torch.bfloat16)
    asked = plain._replace(features=plain.features | GRAD)
    backends = [BACKENDS[name] for name in order(asked)]
    serving = [backend.name for backend in backends if not backend.refusals(asked)]
    assert serving == ["sdpa", "eager"]
    assert not TritonBackend().refusals(plain)


@pytest.mark.parametrize(("padding", "rules", "said"), [
    ([True, False, True, True], {}, "holes"), ([True, True, False, False], {"window": 2}, "last key"),
])  # fmt: skip
def test_padding_that_packed_kernels_cannot_say_is_an_error(
    backend: FlashBackend, padding: list[bool], rules: dict[str, int], said: str
) -> None:
    call = make(MaskStructure(1, 4, 4, causal=True, key_padding=torch.tensor([padding]), **rules))
    with pytest.raises(ValueError, match=said):
        attended(backend, call)
