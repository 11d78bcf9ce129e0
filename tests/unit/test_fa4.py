"""flash-attn 4's arguments against the definition of a structure; a stand-in computes by them."""

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import (
    BIAS,
    COMPILING,
    DROPOUT,
    GRAD,
    HEAD_INT8,
    HEAD_WINDOWS,
    LSE,
    SOFTCAP,
    STORED,
    WINDOW,
    WINDOW_SINKS,
)
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import capability as capability_module
from adaattn_hf.backends.capability import of_sm
from adaattn_hf.backends.flash import Flash4Backend

from ..support.calls import attended, call_over
from .test_flash import by_definition, run_by_run

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
    "window": MaskStructure(2, N, N, causal=True, window=90),
    "window both ways": MaskStructure(2, N, N, window=90),
    "left padding": MaskStructure(3, N, N, causal=True, key_padding=LEFT),
    "documents": MaskStructure(1, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "documents both ways": MaskStructure(1, N, N, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
}


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the package."""

    def dense(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        made = by_definition(q, k, v, kw, endless=None)
        return made.out.to(q.dtype), made.lse.float() if kw["return_lse"] else None

    def varlen(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        return run_by_run(lambda *tensors, **more: dense(*tensors, **more)[0], q, k, v, kw), None

    module: Any = types.ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = dense, varlen
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))


def make(structure: MaskStructure, **extra: Any) -> AttentionCall:
    return call_over(structure, 16, dtype=torch.half, **extra)


def check(call: AttentionCall) -> None:
    result, truth = attended("fa4", call), reference.attention(call)
    torch.testing.assert_close(result.out.double(), truth.out, atol=4e-3, rtol=0)
    if call.need_lse:
        assert result.lse is not None
        torch.testing.assert_close(result.lse.double(), truth.lse, atol=2e-3, rtol=0)


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize("name", STRUCTURES)
def test_equals_reference(name: str) -> None:
    check(make(STRUCTURES[name]))


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize(
    "extra",
    [{"softcap": 1.5}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}, {"need_lse": True}],
    ids=["softcap", "sinks", "lse"],
)
def test_other_mathematics(extra: dict[str, Any]) -> None:
    check(make(STRUCTURES["causal"], **extra))


CUDA = torch.device("cuda")
REFUSALS: dict[str, tuple[int, dict[str, Any]]] = {
    "run on CUDA": (0, {"device": torch.device("cpu")}), "float16 or bfloat16": (0, {"dtype": torch.float32}),
    "up to 128": (GRAD, {"head_dim": 192, "head_dim_v": 192}),
    "multiples of 8": (0, {"head_dim": 20, "head_dim_v": 20}), "no windows per head": (HEAD_WINDOWS, {}),
    "beside a window": (WINDOW | WINDOW_SINKS, {}),
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
    assert backend.refusals(kind._replace(features=WINDOW_SINKS)) == (), "sinks of a window that hides nothing"
    assert any(reason in r for r in backend.refusals(kind._replace(features=kind.features | features, **changes)))


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
