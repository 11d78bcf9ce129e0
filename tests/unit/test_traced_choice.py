"""Choosing a backend while a graph for a CUDA device is traced: nothing that is asked on the way breaks the graph."""

from typing import Any

import pytest
import torch

from adaattn_hf.attention.kind import COMPILING, GRAD, HEAD_WINDOWS, ONE_QUERY, PER_HEAD, WINDOW
from adaattn_hf.backends import capability as capability_module
from adaattn_hf.backends import select

from ..support.calls import kind_with
from ..support.versions import needs_tracing

CALL: dict[str, Any] = {
    "device": torch.device("cuda", 0), "dtype": torch.bfloat16, "head_dim": 64, "head_dim_v": 64, "heads": 8,
    "kv_heads": 2, "shape": "irregular", "keys": 4096, "pairs": 1 << 31,
}  # fmt: skip
PLAN = {"bits": HEAD_WINDOWS | PER_HEAD, "shape": "causal"}


@needs_tracing
@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize(("changes", "taken"), [
    ({}, "sdpa"), ({"bits": GRAD}, "sdpa"), ({"bits": GRAD, "shape": "causal"}, "sdpa"),
    ({"bits": GRAD | WINDOW, "dtype": torch.float16}, "sdpa"),
    ({"bits": WINDOW, "shape": "window"}, "sdpa"), ({"shape": "causal"}, "sdpa"),
    ({"bits": ONE_QUERY, "shape": "ragged", "pairs": 1 << 20}, "triton"), (PLAN, None),
    (PLAN | {"bits": HEAD_WINDOWS | PER_HEAD | GRAD}, None),
    (PLAN | {"bits": HEAD_WINDOWS | PER_HEAD | ONE_QUERY}, "triton"),
])  # fmt: skip
def test_a_graph_is_whole(sm: int, changes: dict[str, Any], taken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability_module, "_sm_while_tracing", torch.compiler.assume_constant_result(lambda index: sm))
    asked = CALL | changes
    bits = asked.pop("bits", 0)
    kind = kind_with()._replace(**asked, features=COMPILING | bits)
    names = tuple(select.BACKENDS)

    def place(x: torch.Tensor) -> torch.Tensor:
        found = select.find(kind)[0]
        return x + (-1 if found is None else names.index(found.name))

    torch._dynamo.reset()
    found = torch.compile(place, backend="eager", fullgraph=True)(torch.zeros(()))
    assert (*names, None)[int(found)] == taken
