"""What a call asks of each key/value head apart: its definition, its facts, and who refuses it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.heads import HeadRules, joined_heads, reference_call, some_heads, some_rows, through_int8
from adaattn_hf.attention.kind import HEAD_BF16, HEAD_INT8, HEAD_WINDOWS
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import BACKENDS

KV, GROUP, D, N = 3, 2, 16, 200


def rules(**changes: Any) -> HeadRules:
    plain = {"windows": (0,) * KV, "sinks": (0,) * KV, "precisions": ("model",) * KV}
    return HeadRules(**{**plain, **changes})  # type: ignore[arg-type]


def request_of(structure: MaskStructure, per_head: HeadRules | None, **more: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    batch = structure.batch
    query = torch.randn(batch, KV * GROUP, structure.q_len, D, generator=generator) * 2
    key = torch.randn(batch, KV, structure.kv_len, D, generator=generator) + 0.5
    value = torch.randn(batch, KV, structure.kv_len, D, generator=generator)
    return AttentionCall(query, key, value, structure, D**-0.5, per_head=per_head, **more)


def by_hand(call: AttentionCall, visible: torch.Tensor) -> torch.Tensor:
    key, value = (t.double().repeat_interleave(GROUP, 1) for t in (call.key, call.value))
    scores = (call.query.double() @ key.mT * call.scaling).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)


def test_each_head_has_its_window_and_sinks() -> None:
    padding = torch.ones(2, N, dtype=torch.bool)
    padding[1, :30] = False
    structure = MaskStructure(2, N, N, causal=True, key_padding=padding)
    call = request_of(structure, rules(windows=(0, 20, 50), sinks=(0, 0, 4)))
    i, j = torch.arange(N)[:, None], torch.arange(N)[None]
    causal = (j <= i) & padding[:, None]
    start = torch.tensor([0, 30])[:, None, None]
    heads = [causal, causal & (j > i - 20), causal & ((j > i - 50) | (j - start < 4))]
    visible = torch.stack([heads[h // GROUP] for h in range(KV * GROUP)], 1)
    found = reference.attention(call).out
    torch.testing.assert_close(found, by_hand(call, visible))
    assert (found - reference.attention(request_of(structure, None)).out)[:, :, GROUP:].abs().max() > 1e-2


@pytest.mark.parametrize("own_sinks", [0, 3])
def test_a_head_never_sees_more_than_the_structure(own_sinks: int) -> None:
    structure = MaskStructure(1, N, N, causal=True, window=40, sinks=own_sinks)
    call = request_of(structure, rules(windows=(80, 20, 40), sinks=(8, 8, 8)))
    visible = reference_call(call).structure.visible()
    own = structure.visible()
    assert not (visible & ~own).any()
    assert torch.equal(visible[:, :GROUP], own.expand(1, GROUP, N, N))
    assert not torch.equal(visible[:, GROUP], own[:, 0])


def test_each_head_has_its_precision() -> None:
    mean = torch.full((KV, D), 0.5)
    call = request_of(MaskStructure(1, N, N, causal=True), rules(precisions=("model", "bf16", "int8"), key_mean=mean))
    changed = reference_call(call)
    assert torch.equal(changed.query[:, :GROUP], call.query[:, :GROUP])
    assert torch.equal(changed.key[:, 1], call.key[:, 1].bfloat16().float())
    assert torch.equal(changed.key[:, 2], through_int8(call.key[:, 2] - 0.5) + 0.5)
    assert torch.equal(changed.value[:, 2], through_int8(call.value[:, 2]))


def test_facts_name_what_heads_ask_for() -> None:
    structure = MaskStructure(1, N, N, causal=True)
    assert not request_of(structure, None).checked_kind().per_head
    assert not request_of(structure, rules()).checked_kind().per_head
    kind = request_of(structure, rules(windows=(5, 0, 0), precisions=("bf16", "model", "int8"))).checked_kind()
    assert kind.per_head
    assert kind.features & HEAD_WINDOWS
    assert kind.features & HEAD_BF16
    assert kind.features & HEAD_INT8
    assert "with windows per head" in kind.words()


@pytest.mark.parametrize("name", ["eager", "sdpa", "fa2", "fa3"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [({"windows": (5, 0, 0)}, "no windows per head"), ({"precisions": ("int8",) * KV}, "no int8 products per head")],
)
def test_who_computes_the_same_for_all_heads_refuses(name: str, changes: dict[str, Any], said: str) -> None:
    structure = MaskStructure(1, N, N, causal=True)
    backend = BACKENDS[name]
    assert any(said in reason for reason in backend.refusals(request_of(structure, rules(**changes)).checked_kind()))
    plain = backend.refusals(request_of(structure, rules()).checked_kind())
    assert not any("per head" in reason for reason in plain)


@pytest.mark.parametrize(("changes", "said"), [
    ({"windows": (1,)}, "entries of windows"), ({"windows": (-1, 0, 0)}, "window -1"),
    ({"precisions": ("fp8",) * KV}, "fp8"), ({"key_mean": torch.zeros(1, D)}, "key_mean"),
])  # fmt: skip
def test_rules_that_no_head_can_follow_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rules(**changes)


def test_some_rows_keep_what_their_heads_see() -> None:
    structure = MaskStructure(1, N, N, causal=True)
    call = request_of(structure, rules(windows=(0, 20, 0), sinks=(0, 3, 0)))
    rows = torch.tensor([150, 7, 199])
    found = reference.attention(some_rows(call, rows)).out
    torch.testing.assert_close(found, reference.attention(call).out[:, rows])


def test_heads_come_apart_and_together_again() -> None:
    call = request_of(MaskStructure(1, N, N, causal=True), rules(windows=(0, 20, 50)))
    order = [[2, 0], [1]]
    parts = [reference.attention(some_heads(call, heads)) for heads in order]
    results = [AttentionResult(part.out, part.lse) for part in parts]
    joined, truth = joined_heads([*zip(order, results, strict=True)], GROUP), reference.attention(call)
    torch.testing.assert_close((joined.out, joined.lse), (truth.out, truth.lse))


def test_rules_for_another_number_of_heads_are_refused() -> None:
    one = rules(windows=(5,), sinks=(0,), precisions=("model",))
    structure = MaskStructure(1, N, N, causal=True)
    with pytest.raises(ValueError, match=rf"got rules for 1 heads, expected one for each of the {KV}"):
        request_of(structure, one).check()
    with pytest.raises(ValueError, match=rf"per_head.key_mean: got shape .* expected \[{KV}, {D}\]"):
        request_of(structure, rules(precisions=("int8",) * KV, key_mean=torch.zeros(KV, D + 1))).check()


@pytest.mark.parametrize(
    "sinks", [[0.0] * KV * GROUP, torch.zeros(KV * GROUP, dtype=torch.int64), torch.zeros(KV * GROUP).to_sparse()],
    ids=["a list", "integers", "sparse"],
)  # fmt: skip
def test_learned_sinks_that_no_kernel_reads_are_refused(sinks: Any) -> None:
    plain = request_of(MaskStructure(1, N, N, causal=True), None)
    with pytest.raises(ValueError, match=r"sink_logits: got .*, expected a dense floating-point tensor on cpu"):
        replace(plain, sink_logits=sinks).check()
