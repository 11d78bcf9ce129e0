"""One query per sequence as a node of a traced graph: the kernel reads lengths and padding where they lie."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.structure import MaskStructure

from .test_triton import EXTRAS, attend, interpreted, make

pytest.importorskip("triton")

from adaattn_hf.backends.triton import step
from adaattn_hf.backends.triton.ops import traced_step
from adaattn_hf.backends.triton.tables import window_table

ROOM = 3000
AT = torch.tensor(2700)
LEFT = torch.ones(3, ROOM, dtype=torch.bool)
LEFT[:, 2701:] = False
LEFT[0, :2300] = False  # further than one look at the padding reaches
LEFT[1, 40:50] = False
NONE = LEFT.clone()
NONE[2] = False
UNREAL = LEFT.clone()
UNREAL[1, 2700] = False
STRUCTURES = {
    "static cache": MaskStructure(3, 1, ROOM, causal=True, q_offset=AT),
    "left padding and holes": MaskStructure(3, 1, ROOM, causal=True, q_offset=AT, key_padding=LEFT),
    "a row of padding": MaskStructure(3, 1, ROOM, causal=True, q_offset=AT, key_padding=NONE),
    "a query that is padding": MaskStructure(3, 1, ROOM, causal=True, q_offset=AT, key_padding=UNREAL),
    "window": MaskStructure(3, 1, ROOM, causal=True, q_offset=AT, window=300),
    "window and sinks behind padding": MaskStructure(
        3, 1, ROOM, causal=True, q_offset=AT, window=300, sinks=5, key_padding=LEFT
    ),
    "encoder's padding": MaskStructure(3, 1, ROOM, key_padding=LEFT),
    "plain": MaskStructure(3, 1, ROOM, causal=True, q_offset=ROOM - 1),
}
RULES = HeadRules((300, 0), (5, 0), ("model", "model"))
ALIKE = HeadRules((300, 300), (5, 5), ("model", "model"))


def asked(structure: MaskStructure, **extra: Any) -> AttentionCall:
    return make(structure, 4, 2, 16, 16, need_lse=False, **extra)


def near(out: Tensor, call: AttentionCall) -> bool:
    return torch.allclose(out.double(), reference.attention(call).out, atol=4e-3, rtol=0)


@interpreted
@pytest.mark.parametrize(("name", "extra"), [
    *((name, "plain") for name in STRUCTURES), *((name, extra) for name in (
        "left padding and holes", "a row of padding", "window and sinks behind padding", "plain",
    ) for extra in ("softcap", "sink logits")),
])  # fmt: skip
def test_equals_the_reference(name: str, extra: str) -> None:
    """Other mathematics beside rows that see nothing, few keys and all of them."""
    call = asked(STRUCTURES[name], **EXTRAS[extra])
    assert near(traced_step(call), call)


@interpreted
@pytest.mark.parametrize("name", ["static cache", "left padding and holes", "window", "plain"])
@pytest.mark.parametrize("rules", [None, RULES], ids=["all heads alike", "rules per head"])
def test_is_one_node_of_a_whole_graph(name: str, rules: HeadRules | None) -> None:
    structure = STRUCTURES[name]
    if rules is not None and structure.window is not None:
        structure = structure.with_changes(window=400)
    call = asked(structure, per_head=rules)
    nodes: list[str] = []

    def kept(graph: Any, inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def traced(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return traced_step(replace(call, query=query, key=key, value=value))

    torch._dynamo.reset()
    compiled = torch.compile(traced, backend=kept, fullgraph=True)
    out = compiled(call.query, call.key, call.value)
    torch._dynamo.reset()
    assert near(out, call)
    assert nodes == ["adaattn_hf.triton_step.default"]


@interpreted
@pytest.mark.parametrize(("name", "rules", "until"), [
    ("static cache", RULES, 1500), ("static cache", ALIKE, 2701), ("left padding and holes", RULES, 2701),
    ("left padding and holes", ALIKE, 1500),
], ids=["some heads", "all heads", "some heads to the last", "all heads behind padding"])  # fmt: skip
def test_windows_end_with_a_position_of_the_sequence(name: str, rules: HeadRules, until: int) -> None:
    """Of the padded rows the first one's query stands at 400, the others' at 2,700."""
    call = asked(STRUCTURES[name], per_head=replace(rules, until=until))
    out = traced_step(call)
    assert near(out, call)
    ruled, exact = (reference.attention(replace(call, per_head=r)).out for r in (rules, None))
    beyond = torch.tensor([name == "static cache", True, True])[:, None, None, None] & (until <= 2700)
    torch.testing.assert_close(out.double(), torch.where(beyond, exact, ruled), atol=4e-3, rtol=0)
    assert not torch.allclose(ruled, exact, atol=4e-3)


def test_windows_have_one_table_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph holds its address; any stream may read it, so that the copy to the device is waited for."""
    device, windows, copied = torch.device("cpu"), ((277, 5), (1 << 30, 0)), Mock(wraps=torch.Tensor.to)
    monkeypatch.setattr(torch.Tensor, "to", lambda *given, **named: copied(*given, **named))
    assert window_table(windows, device) is window_table(windows, device)
    assert window_table(windows, device).tolist() == [[277, 5], [1 << 30, 0]]
    assert [(call.args[1:], call.kwargs) for call in copied.mock_calls] == [((device,), {})]


@interpreted
def test_a_step_of_a_graph_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_buffers", {})
    traced_step(asked(STRUCTURES["plain"]))
    assert not step._buffers
    attend(asked(STRUCTURES["plain"]))
    assert step._buffers


def test_the_memory_of_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_buffers", {(torch.device("cuda", 0), n): () for n in range(step._MOST_STREAMS)})
    _, done = step._scratch(8, 3, torch.device("cpu"), False)
    assert list(step._buffers) == [(torch.device("cpu"), 0)]
    assert step._scratch(8, 3, torch.device("cpu"), False)[1] is done
