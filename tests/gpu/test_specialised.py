"""The warp-specialised kernel for Hopper, against the definition."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.select import BACKENDS

pytest.importorskip("triton")

from adaattn_hf.backends.triton import forward, tiling
from adaattn_hf.backends.triton.launch import Launcher, device_facts

from ..support.calls import attended

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("bulk_always"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or not device_facts(torch.device("cuda", 0)).specialised,
        reason="needs a Hopper device and a Triton with Gluon",
    ),
]

STRUCTURES: dict[str, Callable[[int], MaskStructure]] = {
    "causal": lambda n: MaskStructure(2, n, n, causal=True),
    "full": lambda n: MaskStructure(2, n, n),
    "suffix": lambda n: MaskStructure(2, 300, n, causal=True, q_offset=n - 300),
    "static cache": lambda n: MaskStructure(2, 140, n, causal=True, q_offset=372),
    "cross": lambda n: MaskStructure(2, 70, n),
    "window": lambda n: MaskStructure(2, n, n, causal=True, window=300),
    "window both ways": lambda n: MaskStructure(2, n, n, window=150),
    "window and sinks": lambda n: MaskStructure(2, n, n, causal=True, window=200, sinks=130),
    "left padding": lambda n: MaskStructure(2, n, n, causal=True, key_padding=_left(n)),
    "whole documents": lambda n: MaskStructure(2, n, n, causal=True, **_documents(n, 256)),
    "documents": lambda n: MaskStructure(2, n, n, causal=True, **_documents(n, 230)),
    "documents, not causal": lambda n: MaskStructure(2, n, n, **_documents(n, 331)),
    "some short documents": lambda n: MaskStructure(1, n, n, causal=True, **_uneven(n, 300, 20, 0, 129, 127, 64)),
    "right padding": lambda n: MaskStructure(2, n, n, causal=True, key_padding=_left(n).flip(1)),
    "static cache, odd": lambda n: MaskStructure(2, 140, n, causal=True, q_offset=361),
    "window over documents": lambda n: MaskStructure(2, n, n, causal=True, window=150, **_documents(n, 331)),
    "sinks over documents": lambda n: MaskStructure(2, n, n, causal=True, window=99, sinks=130, **_documents(n, 331)),
}
WINDOWS = {"narrow": ((40, 0), (5, 0)), "wide": ((300, 700), (16, 140)), "sinks of many tiles": ((130, 0), (400, 0))}


def _left(n: int) -> torch.Tensor:
    real = torch.ones(2, n, dtype=torch.bool, device="cuda")
    real[0, :300] = False
    return real


def _uneven(n: int, *lengths: int) -> dict[str, torch.Tensor]:
    numbers = torch.repeat_interleave(
        torch.arange(len(lengths) + 1, device="cuda"), torch.tensor([*lengths, n - sum(lengths)], device="cuda")
    )[None]
    return {"q_segments": numbers, "k_segments": numbers}


def _documents(n: int, length: int) -> dict[str, torch.Tensor]:
    numbers = (torch.arange(n, device="cuda")[None] // length).expand(2, -1)
    return {"q_segments": numbers, "k_segments": numbers}


def drawn(structure: MaskStructure, dim: int, heads: int, dtype: torch.dtype, **extra: Any) -> AttentionCall:
    def draw(length: int, count: int) -> torch.Tensor:
        return torch.randn(structure.batch, length, count, dim, device="cuda").to(dtype).transpose(1, 2)

    lengths = structure.q_len, structure.kv_len
    return AttentionCall(
        draw(lengths[0], heads), draw(lengths[1], 2), draw(lengths[1], 2), structure, dim**-0.5, **extra
    )


def served(request: AttentionCall, kernel: str) -> Any:
    launched, call = [], Launcher.__call__

    def noted(self: Any, *arguments: Any) -> None:
        launched.append(self._kernel.__name__)
        call(self, *arguments)

    with mock.patch.object(Launcher, "__call__", noted):
        result = attended(BACKENDS["triton"], request)
    assert kernel in launched
    return result


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64 channels are served however few keys their queries read."""
    monkeypatch.setattr(tiling, "_LEAST_OF_WINDOWS", 0)
    monkeypatch.setattr(tiling, "_LEAST_OF_ROWS", 0)


def check(request: AttentionCall, kernel: str = "specialised") -> None:
    truth, result = reference.attention(request), served(request, kernel)
    bound = 4 * torch.finfo(request.query.dtype).eps * truth.out.abs().max()
    assert (result.out.double() - truth.out).abs().max() <= bound
    if request.need_lse:
        assert truth.lse is not None
        there = truth.lse > float("-inf")
        assert torch.equal(there, result.lse > float("-inf"))
        torch.testing.assert_close(result.lse.double()[there], truth.lse[there], atol=1e-3, rtol=1e-4)
    again = attended(BACKENDS["triton"], request)  # by what the first launch left behind
    assert torch.equal(again.out, result.out)


@pytest.mark.parametrize("n", [1024, 1200])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("name", STRUCTURES)
def test_heads_of_128_channels(name: str, heads: int, n: int) -> None:
    check(drawn(STRUCTURES[name](n), 128, heads, torch.bfloat16, need_lse=True))


@pytest.mark.parametrize("n", [1024, 1200])
@pytest.mark.parametrize("heads", [2, 6, 8])
@pytest.mark.parametrize(
    "name", ["causal", "full", "suffix", "static cache", "cross", "left padding", "documents", "some short documents"]
)
def test_heads_of_64_channels(name: str, heads: int, n: int, any_length: None) -> None:
    """Three groups of warps: with six heads those of a group together, else rows of one head."""
    check(drawn(STRUCTURES[name](n), 64, heads, torch.float16, need_lse=True))


@pytest.mark.parametrize("rules", WINDOWS)
@pytest.mark.parametrize("name", ["causal", "full", "suffix", "documents", "some short documents"])
@pytest.mark.parametrize(("dim", "heads"), [(128, 8), (64, 6), (64, 8)])
def test_windows_per_head(name: str, rules: str, dim: int, heads: int, any_length: None) -> None:
    windows, sinks = WINDOWS[rules]
    rule = HeadRules(windows, sinks, ("model",) * 2)
    check(drawn(STRUCTURES[name](1500), dim, heads, torch.bfloat16, per_head=rule, need_lse=True))


@pytest.mark.parametrize("name", ["window", "window both ways", "window and sinks"])
def test_windows_of_64_channels(name: str, any_length: None) -> None:
    check(drawn(STRUCTURES[name](1200), 64, 6, torch.float16, need_lse=True))


@pytest.mark.parametrize("rules", [None, "narrow"])
@pytest.mark.parametrize(("dim", "heads"), [(128, 8), (64, 6)])
def test_what_is_not_a_number_stays_in_its_document(dim: int, heads: int, rules: str | None, any_length: None) -> None:
    """A weight of 0 would not keep it out: nothing behind a document may be brought with its last tile."""
    extra = {} if rules is None else {"per_head": HeadRules(*WINDOWS[rules], ("model",) * 2)}
    n = 1000
    whole = drawn(MaskStructure(1, n, n, causal=True, **_uneven(n, 300, 401, 20)), dim, heads, torch.bfloat16, **extra)
    expected = served(whole, "specialised").out
    for start, stop in ((0, 300), (300, 701), (701, 721), (721, n)):
        lost = replace(whole, key=whole.key.clone(), value=whole.value.clone())
        lost.key[:, :, start:stop] = float("nan")
        lost.value[:, :, start:stop] = float("inf")
        out = served(lost, "specialised").out
        assert not out[:, start:stop].isfinite().all()
        assert torch.equal(out[:, :start], expected[:, :start])
        assert torch.equal(out[:, stop:], expected[:, stop:])


def test_more_items_than_programs(any_length: None) -> None:
    """Two turns and many, dealt out in both ways."""
    for n, heads in ((5000, 6), (30_000, 8)):
        rule = HeadRules((0, 700), (0, 16), ("model",) * 2)
        request = drawn(MaskStructure(1, n, n, causal=True), 64, heads, torch.bfloat16, per_head=rule)
        out = served(request, "specialised").out
        plain = device_facts(request.query.device)._replace(specialised=False)
        with mock.patch.object(forward, "device_facts", return_value=plain):
            other = drawn(MaskStructure(1, n, n, causal=True), 64, heads, torch.bfloat16, per_head=rule)
            tensors = {name: getattr(request, name) for name in ("query", "key", "value")}
            expected = served(replace(other, **tensors), "forward").out
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_learned_sinks() -> None:
    logits = torch.randn(8, device="cuda", dtype=torch.bfloat16)
    check(drawn(STRUCTURES["causal"](700), 128, 8, torch.bfloat16, sink_logits=logits, need_lse=True))


def test_long_causal_calls_come_here_before_torchs() -> None:
    for batch, n, ours in ((1, 1024, True), (8, 1024, False), (1, 4096, True)):
        request = drawn(MaskStructure(batch, n, n, causal=True), 128, 32, torch.bfloat16)
        order = select.order(request.checked_kind())
        assert ("triton" in order) is ours
        assert order[-2:] == ("sdpa", "eager")


@pytest.mark.parametrize("rules", [None, "wide"])
def test_a_capture_makes_its_own_tables_and_replays_what_the_tensors_hold_then(rules: str | None) -> None:
    """Of a structure that was never seen before, which is gone when the graph is replayed."""
    extra = {} if rules is None else {"per_head": HeadRules(*WINDOWS[rules], ("model",) * 2)}
    request = drawn(STRUCTURES["causal"](1024), 128, 8, torch.bfloat16, **extra)
    attended(BACKENDS["triton"], replace(request))
    graph = torch.cuda.CUDAGraph()
    anew = replace(request, structure=STRUCTURES["causal"](1024))
    with torch.cuda.graph(graph):
        out = attended(BACKENDS["triton"], anew).out
    del anew
    request.query.copy_(torch.randn_like(request.query))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, attended(BACKENDS["triton"], request).out)


def test_other_calls_go_to_the_kernels_of_one_task() -> None:
    """A softcap, short documents alone, other head sizes, windows of small heads: by `forward`, and as exact."""
    n = 700
    others = [
        drawn(STRUCTURES["causal"](n), 128, 8, torch.bfloat16, softcap=20.0),
        drawn(MaskStructure(2, n, n, causal=True, **_documents(n, 30)), 128, 8, torch.bfloat16),
        drawn(STRUCTURES["causal"](n), 96, 8, torch.bfloat16),
        drawn(STRUCTURES["window"](n), 64, 8, torch.bfloat16),
    ]
    for request in others:
        check(request, "forward")
