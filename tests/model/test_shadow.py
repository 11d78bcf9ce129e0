"""Shadowing: kernels that answer wrong are found, in every backend and under plans; right ones are left in peace."""

from typing import Any

import pytest
import torch

import adaattn_hf
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.backends import select
from adaattn_hf.patches.observe import shadow
from adaattn_hf.plans import execute

from ..support.choices import make_choice
from ..support.models import fresh_pair, padding, tokens
from ..support.plans import give


def run(model: Any, **keywords: Any) -> None:
    with torch.no_grad():
        model(input_ids=tokens(), **keywords)


def spoil(monkeypatch: pytest.MonkeyPatch, backend: str, factor: float = 1.01) -> None:
    kind = type(select.BACKENDS[backend])
    right = kind.kernel

    def wrong(self: Any, kind: Any, rules: Any) -> Any:
        kernel = right(self, kind, rules)

        def spoilt(call: Any) -> AttentionResult:
            result = kernel(call)
            return AttentionResult(result.out * factor, result.lse)

        return spoilt

    monkeypatch.setattr(kind, "kernel", wrong)
    monkeypatch.setattr(select, "launches", {})


@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    def shadowed(mismatch: str = "raise") -> Any:
        model = fresh_pair("llama").ours
        settings = adaattn_hf.AdaAttnConfig(backend=backend, shadow=1, mismatch=mismatch)
        adaattn_hf.configure(model, settings)
        return model

    model = shadowed()
    run(model)
    run(model, attention_mask=padding("left"))
    spoil(monkeypatch, backend)
    with pytest.raises(shadow.ShadowMismatch, match=rf"layer 0 .* on {backend} is off by 0\.01"):
        run(shadowed())
    with pytest.warns(RuntimeWarning, match="is off by") as told:
        run(shadowed("warn"))
    assert {one.filename for one in told} == {__file__}


@pytest.mark.parametrize(
    "choice", [make_choice("window", 4), make_choice(precision="int8"), make_choice("window", 4, precision="bf16")]
)
def test_a_wrong_kernel_is_found_under_a_plan(monkeypatch: pytest.MonkeyPatch, choice: Any) -> None:
    model, other = fresh_pair("llama").ours, fresh_pair("llama").ours
    for one in (model, other):
        give(one, choice)
        one.config.adaattn["shadow"] = 1
    run(other)  # the plan's own loss is no mismatch
    right = execute.attend

    def wrong(bound_layer: Any, call: Any, backend: str | None = None, *rest: Any) -> AttentionResult:
        result = right(bound_layer, call, backend, *rest)
        return AttentionResult(result.out * (1.2 if backend is None else 1.0), result.lse)

    monkeypatch.setattr(execute, "attend", wrong)
    with pytest.raises(shadow.ShadowMismatch, match="planned"):
        run(model)


def test_only_the_first_calls_of_each_kind_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_pair("llama").ours
    compared: list[Any] = []
    right = reference.attention

    def counted(call: AttentionCall) -> Any:
        compared.append(call)
        return right(call)

    monkeypatch.setattr(reference, "attention", counted)
    model.config.adaattn = {"shadow": 2}
    for _ in range(3):
        run(model)
    assert len(compared) == 2 * 2  # two calls of each of two layers
    run(model, attention_mask=padding("left"))
    assert len(compared) == 6  # another kind
    twin = fresh_pair("llama").ours
    twin.config.adaattn = {"shadow": 1}
    run(twin)
    assert len(compared) == 8  # another model


def test_a_nan_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_pair("llama").ours
    model.config.adaattn = {"shadow": 1, "backend": "sdpa"}
    spoil(monkeypatch, "sdpa", float("nan"))
    with pytest.raises(shadow.ShadowMismatch, match="off by nan"):
        run(model)


@pytest.mark.parametrize(
    ("settings", "says"), [({"shadow": -1}, "how many calls"), ({"mismatch": "panic"}, "raise, warn")]
)
def test_wrong_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(adaattn_hf.ConfigError, match=says):
        adaattn_hf.AdaAttnConfig(**settings)
