"""A kernel that is kept serves its own kind of call alone: whatever a kernel or a check reads changes the kind."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.patches.call.interface import attention_function

from ..support.calls import ON_CPU, assert_right, calls, generator
from ..support.malformed import Layer

B, H, KV, N, D = 2, 4, 2, 9, 8
Change = Callable[[AttentionCall], AttentionCall]


def plain() -> AttentionCall:
    random = generator(0)
    query, key, value = (torch.randn(B, heads, N, D, generator=random) for heads in (H, KV, KV))
    return AttentionCall(query, key, value, MaskStructure(B, N, N, causal=True), 0.3)


def with_rules(call: AttentionCall, **rules: Any) -> AttentionCall:
    return replace(call, structure=call.structure.with_changes(**rules))


def in_dtype(dtype: torch.dtype, *names: str) -> Change:
    return lambda call: replace(call, **{name: getattr(call, name).to(dtype) for name in names})


def on_meta(name: str) -> Change:
    return lambda call: replace(call, **{name: getattr(call, name).to("meta")})


def one_query(call: AttentionCall) -> AttentionCall:
    return replace(call, query=call.query[:, :, -1:], structure=MaskStructure(B, 1, N, causal=True, q_offset=N - 1))


PADDING = torch.arange(N) >= torch.tensor([[0], [3]])
DOCUMENTS = (torch.arange(N) // 4)[None]
TENSORS = "query", "key", "value"
OTHER_KINDS: dict[str, Change] = {
    "dtype": in_dtype(torch.bfloat16, *TENSORS),
    "gradient of the key": lambda call: replace(call, key=call.key.clone().requires_grad_()),
    "gradient of a bias": lambda call: replace(call, bias=torch.zeros(1, 1, N, N).requires_grad_()),
    "heads": lambda call: replace(call, query=call.query.repeat(1, 2, 1, 1)),
    "head size of values": lambda call: replace(call, value=call.value[..., :5]),
    "softcap": lambda call: replace(call, softcap=2.0),
    "learned sinks": lambda call: replace(call, sink_logits=torch.ones(H)),
    "bias": lambda call: replace(call, bias=torch.ones(H, N, N).tril()),
    "log-sum-exp": lambda call: replace(call, need_lse=True),
    "window": lambda call: with_rules(call, window=3),
    "window with sinks": lambda call: with_rules(call, window=3, sinks=1),
    "no causality": lambda call: with_rules(call, causal=False),
    "an offset": lambda call: with_rules(call, q_offset=2),
    "padding": lambda call: with_rules(call, key_padding=PADDING),
    "documents": lambda call: with_rules(call, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "dense mask": lambda call: with_rules(call, mask=torch.ones(1, 1, N, N).tril(-1).bool()),
    "one query": one_query,
    "windows per head": lambda call: replace(call, per_head=HeadRules((3, 0), (1, 0), ("model",) * 2)),
    "no keys": lambda call: replace(
        call, key=call.key[:, :, :0], value=call.value[:, :, :0], structure=MaskStructure(B, N, 0)
    ),
}
SAME_KIND: dict[str, Change] = {
    "strides": lambda call: replace(call, key=call.key.transpose(1, 2).contiguous().transpose(1, 2)),
    "a channel apart": lambda call: replace(call, key=call.key.mT.contiguous().mT),
    "another factor": lambda call: replace(call, scaling=1.5),
    "a negative factor": lambda call: replace(call, scaling=-0.5),
    "a factor of 0": lambda call: replace(call, scaling=0.0),
    "lazily negated": lambda call: replace(call, query=torch._neg_view(call.query)),
    "another length": lambda call: replace(
        call, key=call.key[:, :, :5], value=call.value[:, :, :5], query=call.query[:, :, :5],
        structure=MaskStructure(B, 5, 5, causal=True),
    ),
    "one row for all": lambda call: replace(call, query=call.query[:1]),
}  # fmt: skip
WRONG: dict[str, Change] = {
    "dtype of the key": in_dtype(torch.float64, "key"), "dtype of the value": in_dtype(torch.bfloat16, "value"),
    "whole numbers": in_dtype(torch.int64, *TENSORS), "device of the query": on_meta("query"),
    "device of the key": on_meta("key"), "device of the value": on_meta("value"),
    "a sparse value": lambda call: replace(call, value=call.value.to_sparse()),
    "three dimensions": lambda call: replace(call, key=call.key[0]),
    "heads that do not divide": lambda call: replace(call, query=call.query[:, :3]),
    "no key heads": lambda call: replace(call, key=call.key[:, :0], value=call.value[:, :0]),
    "fewer values": lambda call: replace(call, value=call.value[:, :, 1:]),
    "fewer heads of values": lambda call: replace(call, value=call.value[:, 1:]),
    "more rows of values": lambda call: replace(call, value=call.value.repeat(2, 1, 1, 1)),
    "narrower keys": lambda call: replace(call, key=call.key[..., 1:]),
    "three rows": lambda call: replace(call, key=call.key.repeat(3, 1, 1, 1)),
    "more queries": lambda call: replace(call, query=call.query.repeat(1, 1, 2, 1)),
    "a structure of more keys": lambda call: replace(call, structure=MaskStructure(B, N, N + 1)),
    "a structure of more rows": lambda call: replace(call, structure=MaskStructure(3, N, N)),
    "a mask of other heads": lambda call: with_rules(call, mask=torch.ones(1, 3, N, N).bool()),
    "a softcap of 0": lambda call: replace(call, softcap=0.0),
    "a dropout of 2": lambda call: replace(call, dropout=2.0),
    "sinks of few heads": lambda call: replace(call, sink_logits=torch.zeros(H - 1)),
    "sinks on another device": lambda call: replace(call, sink_logits=torch.zeros(H, device="meta")),
    "a bias of other rows": lambda call: replace(call, bias=torch.zeros(3, 1, N, N)),
    "rules of other heads": lambda call: replace(call, per_head=HeadRules((3,) * 3, (0,) * 3, ("model",) * 3)),
}  # fmt: skip


def served(call: AttentionCall, backend: str | None) -> bool:
    """Whether the call is not refused; its answer is right."""
    try:
        found = select.attend(call, backend)
    except select.BackendRefusal:
        return False
    call.check()
    if not call.key.shape[2]:
        assert not found.out.any()
        return True
    with torch.no_grad():
        assert_right(call, found.out)
    assert found.lse is not None or not call.need_lse
    assert found.out.requires_grad is call.checked_kind().needs_grad
    return True


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "plain_kernels", {})


BACKENDS = pytest.mark.parametrize("backend", [None, *ON_CPU])


@BACKENDS
@pytest.mark.parametrize("name", [*OTHER_KINDS, *SAME_KIND])
def test_what_is_changed_is_heard(name: str, backend: str | None) -> None:
    """In a call behind one that it differs from in one fact, and back again."""
    if backend == "native" and (found := ON_CPU[backend].missing()):
        pytest.skip("; ".join(found))
    change = OTHER_KINDS.get(name) or SAME_KIND[name]
    answers = [served(call, backend) for call in (plain(), change(plain()), plain(), change(plain()))]
    assert answers[0] is answers[2] is True
    assert answers[1] is answers[3]
    assert backend is not None or answers[1] or name == "windows per head"


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_a_fact_that_kernels_rest_on_is_part_of_the_kind(name: str) -> None:
    assert OTHER_KINDS[name](plain()).checked_kind() != plain().checked_kind()


@BACKENDS
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_in_the_same_words_behind_a_good_one(name: str, backend: str | None) -> None:
    with pytest.raises(ValueError, match=r"got|made for") as first:
        WRONG[name](plain()).check()
    for good in (plain(), replace(plain(), softcap=2.0), replace(plain(), sink_logits=torch.zeros(H))):
        try:
            select.attend(good, backend)
        except select.BackendRefusal:
            continue
        with pytest.raises(ValueError, match=r"got|made for") as refused:
            select.attend(WRONG[name](good), backend)
        if (good.softcap, good.sink_logits) == (None, None):
            assert str(refused.value) == str(first.value)


@settings(max_examples=60)
@given(calls=st.lists(calls(), min_size=2, max_size=4), backend=st.sampled_from([None, *ON_CPU]))
def test_calls_one_after_another_are_right(calls: list[AttentionCall], backend: str | None) -> None:
    for call in (*calls, *calls):
        served(call, backend)


@pytest.fixture
def settings_restored() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def behind(change: Callable[..., object], *given: Any) -> Any:
    """A block without an effect of its own, behind a change that stays."""
    change(*given)
    return nullcontext()


@pytest.mark.usefixtures("settings_restored")
@BACKENDS
def test_settings_of_the_process_are_heard(backend: str | None) -> None:
    """Threads, deterministic algorithms, autocast, training: behind a call that was made without them."""
    attend, call, module = attention_function(backend), plain(), Layer(1)
    tensors = call.query, call.key, call.value
    truth = reference.attention(replace(call, structure=MaskStructure(B, N, N))).out.float()
    contexts: dict[str, Callable[[], Any]] = {
        "plain": nullcontext, "one thread": partial(behind, torch.set_num_threads, 1),
        "two threads": partial(behind, torch.set_num_threads, 2),
        "deterministic": partial(behind, torch.use_deterministic_algorithms, True),
        "training": partial(behind, module.train), "gradients off": torch.no_grad,
        "inference": torch.inference_mode,
    }  # fmt: skip
    for name in (*contexts, "plain"):
        with contexts[name]():
            out, _ = attend(module, *tensors, None, scaling=call.scaling, is_causal=False)
        torch.testing.assert_close(out, truth, msg=name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attend(module, *tensors, None, scaling=call.scaling, is_causal=False)
    torch.testing.assert_close(out.float(), truth, atol=0.03, rtol=0.03)


def test_many_threads_with_more_kinds_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "MAX_KINDS", 4)
    rules = HeadRules((3, 0), (1, 0), ("model",) * 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    kinds = [replace(plain(), per_head=one) for one in (None, rules)] + [
        change(plain()) for name, change in OTHER_KINDS.items() if name not in ("no keys", "windows per head")
    ]
    truths = [reference.attention(call).out.detach() for call in kinds]

    def work(thread: int) -> None:
        for turn in range(150):
            which = (thread * 7 + turn * (thread + 1)) % len(kinds)
            try:
                out = select.attend(kinds[which]).out.detach()
            except select.BackendRefusal:
                assert kinds[which].per_head is not None
                continue
            torch.testing.assert_close(out.double(), truths[which], atol=0.03, rtol=0.03)

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(select.plain_kernels) <= select.MAX_KINDS + 8
    assert len(rules.kernels) <= select.MAX_KINDS + 8
