"""Choosing a backend: in order, once, with all reasons said; a named backend never falls back."""

import logging
from typing import Any

import pytest
import torch

from adaattn_hf import errors
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.kind import (
    BIAS,
    COMPILING,
    DROPOUT,
    GRAD,
    HEAD_WINDOWS,
    LOOKED,
    LSE,
    ONE_QUERY,
    OPTIONS,
    PER_HEAD,
    SINKS,
    SOFTCAP,
    WINDOW,
    CallKind,
)
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.base import Backend, Kernel
from adaattn_hf.backends.eager import EagerBackend
from adaattn_hf.backends.sdpa import dispatch

from ..support.calls import kind_with
from ..support.on_device import told_of
from ..support.versions import needs_tracing


class Picky(Backend):
    """Refuses what it is told to refuse, and counts how often it is asked."""

    supports = EagerBackend.supports

    def __init__(self, name: str, missing: tuple[str, ...] = (), reasons: tuple[str, ...] = ()) -> None:
        self.name = name
        self.lacks, self.reasons, self.asked = missing, reasons, 0

    def missing(self) -> tuple[str, ...]:
        self.asked += 1
        return self.lacks

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        return self.reasons

    def kernel(self, kind: CallKind, rules: HeadRules | None) -> Kernel:
        return EagerBackend().kernel(kind, rules)


def call(head_dim: int = 4) -> AttentionCall:
    x = torch.zeros(1, 2, 3, head_dim)
    return AttentionCall(x, x, x, MaskStructure(1, 3, 3), scaling=1.0)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> dict[str, Picky]:
    backends = {
        "absent": Picky("absent", missing=("absent is not installed",)),
        "strict": Picky("strict", reasons=("strict dislikes Tuesdays", "strict dislikes floats")),
        "willing": Picky("willing"),
    }
    monkeypatch.setattr(select, "BACKENDS", backends)
    monkeypatch.setattr(select, "order", lambda kind: ("absent", "strict", "willing"))
    monkeypatch.setattr(select, "plain_kernels", {})
    monkeypatch.setattr(errors, "_said", set())
    return backends


def test_the_first_that_refuses_nothing_is_taken_and_remembered(three: dict[str, Picky]) -> None:
    assert select.choose(kind_with()) is three["willing"]
    for asked in (2, 2, 3):
        select.attend(call(4 if asked == 2 else 8))
        assert [backend.asked for backend in three.values()] == [asked] * 3


def test_one_line_says_which_was_taken_and_why_not_the_others(
    three: dict[str, Picky], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="adaattn_hf"):
        select.attend(call())
        select.attend(call(8))
    assert len(caplog.records) == 1
    (line,) = caplog.messages
    for part in ("willing serves cpu float32", "absent is not installed", "dislikes Tuesdays; strict dislikes floats"):
        assert part in line


def test_nothing_is_logged_while_a_graph_is_traced(
    three: dict[str, Picky], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_with(COMPILING)
    monkeypatch.setattr(AttentionCall, "checked_kind", lambda *_: kind)
    with caplog.at_level(logging.DEBUG, logger="adaattn_hf"):
        select.attend(call())
    assert three["willing"].asked == 1
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "reasons"), [("absent", ["absent is not installed"]), ("strict", ["dislikes Tuesdays", "dislikes floats"])]
)
def test_a_named_backend_is_never_replaced(three: dict[str, Picky], name: str, reasons: list[str]) -> None:
    with pytest.raises(select.BackendRefusal) as refused:
        select.choose(kind_with(), name)
    for part in (repr(name), *reasons, 'attn_implementation="adaattn"'):
        assert part in str(refused.value)
    assert three["willing"].asked == 0
    assert select.choose(kind_with(), "willing") is three["willing"]


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_every_order_ends_with_backends_that_serve_everything(device: str) -> None:
    names = select.order(kind_with(device=device))
    assert names[-1] == "eager"
    assert set(names) <= set(select.BACKENDS)
    assert len(set(names)) == len(names)


def test_eager_refuses_nothing() -> None:
    hardest = kind_with(SOFTCAP, SINKS, LSE, BIAS, DROPOUT, shape="irregular")
    assert select.refusals_of("eager", hardest) == ()
    assert select.refusals_of("sdpa", hardest) != ()
    assert select.choose(hardest).name == "eager"


def test_the_log_sum_exp_of_other_devices_is_left_to_plain_attention() -> None:
    (reason,) = select.refusals_of("sdpa", kind_with(LSE, device="mps"))
    assert reason == "torch's kernels have no log-sum-exp"
    assert select.choose(kind_with(LSE, device="mps")).name == "eager"


def test_one_query_of_ungrouped_heads_goes_by_what_it_reads() -> None:
    """From the caches to the native kernels, from memory to torch's product."""

    def first(kv_len: int) -> str:
        query, key = torch.zeros(1, 12, 1, 64), torch.zeros(1, 12, 1, 64).expand(1, 12, kv_len, 64)
        structure = MaskStructure(1, 1, kv_len, causal=True, q_offset=kv_len - 1)
        return select.order(AttentionCall(query, key, key, structure, 1.0).checked_kind())[0]

    assert [first(64), first(16384)] == ["native", "sdpa"]
    assert select.order(kind_with(ONE_QUERY, COMPILING, shape="suffix"))[0] == "sdpa"


@pytest.mark.parametrize(("packed", "pairs", "groups", "dim", "hopper", "first"), [
    # nothing to gather in a packed row; in a padded batch our own kernels read tokens where they are
    (1024, 1 << 33, 1, 4, False, "fa3_fwd"), (0, 1 << 33, 1, 4, False, "triton"),
    (1024, 1 << 29, 1, 4, False, "triton"),
    # three narrow heads a group, and short documents, are for our kernel for Hopper
    (4096, 1 << 33, 3, 64, True, "triton"), (4096, 1 << 33, 3, 64, False, "fa3_fwd"),
    (4096, 1 << 33, 7, 64, True, "fa3_fwd"), (2048, 1 << 33, 3, 128, True, "fa3_fwd"),
    (1024, 1 << 33, 4, 128, True, "triton"), (1024, 1 << 33, 4, 128, False, "fa3_fwd"),
    (1024, 1 << 33, 4, 64, True, "fa3_fwd"),
])  # fmt: skip
def test_runs_that_fill_their_rows_go_to_flash_attn_unless_our_kernel_for_hopper_takes_them(
    packed: int, pairs: int, groups: int, dim: int, hopper: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(select.BACKENDS["triton"]), "specialised", lambda self, asked: hopper)
    ragged: dict[str, Any] = {"device": "cuda", "shape": "ragged", "packed": packed, "pairs": pairs}
    heads: dict[str, Any] = {"groups": groups, "head_dim": dim, "head_dim_v": dim}
    assert select.order(kind_with(LOOKED, **ragged, **heads))[0] == first


@pytest.mark.parametrize(("changes", "first"), [
    ({}, "sdpa"), ({"pairs": 1 << 26}, "fa4"), ({"head_dim": 128, "head_dim_v": 128}, "fa4"),
    ({"dtype": torch.float32}, "fa4"), ({"more": SINKS}, "fa4"), ({"grad": 0}, "triton"),
])  # fmt: skip
def test_light_training_over_runs_is_one_call_of_torch_with_a_mask(changes: dict[str, Any], first: str) -> None:
    light: dict[str, Any] = {"device": "cuda", "shape": "ragged", "pairs": 1 << 25}
    half = {"dtype": torch.bfloat16, "head_dim": 64, "head_dim_v": 64}
    bits = LOOKED, changes.pop("grad", GRAD), changes.pop("more", 0)
    asked = kind_with(*bits, **light | half | changes)
    assert select.order(asked)[0] == first
    assert (dispatch.way_of(asked) is dispatch._masked) is (first == "sdpa")


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("pairs", [1 << 20, 1 << 19])
def test_heavy_steps_are_ours_on_hopper(pairs: int, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(select.BACKENDS["triton"]), "specialised", lambda self, asked: hopper)
    step: dict[str, Any] = {"device": "cuda", "shape": "suffix", "keys": 1 << 15, "pairs": pairs}
    heads: dict[str, Any] = {"dtype": torch.float16, "groups": 4, "head_dim": 128, "head_dim_v": 128}
    assert (select.order(kind_with(ONE_QUERY, **step | heads))[0] == "triton") is (hopper and pairs == 1 << 20)


def test_windows_per_head_go_to_our_own_kernel_and_exact_heavy_calls_to_flash_attn() -> None:
    """As docs/results/gpu_plans.md has it; exact heavy calls go to the build for inference first."""
    assert select.order(kind_with(HEAD_WINDOWS, PER_HEAD, device="cuda", pairs=1 << 30)) == ("triton",)
    assert select.order(kind_with(device="cuda", shape="causal", pairs=1 << 33))[:2] == ("fa3_fwd", "fa4")


def test_a_packed_row_is_known_by_its_longest_document_and_a_padded_one_is_not() -> None:
    documents, padding = torch.tensor([[0] * 5 + [1] * 7]), torch.arange(12)[None] >= 4
    packed = MaskStructure(1, 12, 12, causal=True, q_segments=documents, k_segments=documents)
    padded = MaskStructure(1, 12, 12, causal=True, key_padding=padding)
    x = torch.zeros(1, 2, 12, 4)
    seen = [AttentionCall(x, x, x, s, 1.0).checked_kind(named=True).packed for s in (packed, padded)]
    assert seen == [4, 0]


@pytest.mark.parametrize("reasons", [(), ("willing is tired",)], ids=["served", "refused by all"])
def test_what_was_decided_is_remembered_and_does_not_pile_up(
    three: dict[str, Picky], monkeypatch: pytest.MonkeyPatch, reasons: tuple[str, ...]
) -> None:
    monkeypatch.setattr(select, "MAX_KINDS", 3)
    three["willing"].reasons = reasons
    for size in range(1, 9):
        assert (select.kernel_of(call(size)) is None) is bool(reasons)
        assert len(select.plain_kernels) <= 3
    asked = three["willing"].asked
    assert (select.kernel_of(call(8)) is None) is bool(reasons)
    assert three["willing"].asked == asked


@pytest.mark.parametrize("name", select.BACKENDS)
def test_what_a_backend_does_not_name_it_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is added to requests is served by nobody who has not heard of it."""
    monkeypatch.setitem(OPTIONS, ONE_QUERY, "planted option")
    backend = select.BACKENDS[name]
    assert any(said.endswith("have no planted option") for said in backend.refusals(kind_with(ONE_QUERY)))
    assert not any("planted" in said for said in backend.refusals(kind_with()))


TRACED: dict[str, Any] = {
    "device": torch.device("cuda", 0), "dtype": torch.bfloat16, "head_dim": 64, "head_dim_v": 64, "heads": 8,
    "kv_heads": 2, "shape": "irregular", "keys": 4096, "pairs": 1 << 31,
}  # fmt: skip
TAKEN: list[tuple[int, dict[str, Any], str | None]] = [
    (0, {}, "sdpa"), (GRAD, {}, "sdpa"), (GRAD, {"shape": "causal"}, "sdpa"),
    (GRAD | WINDOW, {"dtype": torch.float16}, "sdpa"), (WINDOW, {"shape": "window"}, "sdpa"),
    (0, {"shape": "causal"}, "sdpa"), (ONE_QUERY, {"shape": "ragged", "pairs": 1 << 20}, "triton"),
    (HEAD_WINDOWS | PER_HEAD, {"shape": "causal"}, None), (HEAD_WINDOWS | PER_HEAD | GRAD, {"shape": "causal"}, None),
    (HEAD_WINDOWS | PER_HEAD | ONE_QUERY, {"shape": "causal"}, "triton"),
]  # fmt: skip
"""What a call asks for while a graph for a CUDA device is traced, what else it changes, and who takes it."""


@needs_tracing
@pytest.mark.parametrize("sm", [80, 90, 120])
def test_nothing_that_is_asked_on_the_way_breaks_a_graph(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told_of(monkeypatch, divmod(sm, 10))
    kinds = [
        kind_with()._replace(**TRACED | changes, features=COMPILING | bits)  # type: ignore[arg-type]
        for bits, changes, _ in TAKEN
    ]
    names = tuple(select.BACKENDS)

    def places(x: torch.Tensor) -> list[torch.Tensor]:
        found = [select.find(kind)[0] for kind in kinds]
        return [x + (-1 if one is None else names.index(one.name)) for one in found]

    torch._dynamo.reset()
    found = torch.compile(places, backend="eager", fullgraph=True)(torch.zeros(()))
    assert [(*names, None)[int(one)] for one in found] == [taken for *_, taken in TAKEN]
