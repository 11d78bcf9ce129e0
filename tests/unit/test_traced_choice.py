"""Choosing a backend while a graph for a CUDA device is traced: nothing that is asked on the way breaks the graph."""

from typing import Any

import pytest
import torch

from adaattn_hf.attention.kind import CallSpec
from adaattn_hf.backends import capability as capability_module
from adaattn_hf.backends import select

from ..support.versions import needs_tracing

CALL: dict[str, Any] = {
    "device": "cuda", "dtype": torch.bfloat16, "head_dim": 64, "head_dim_v": 64, "groups": 4, "kind": "irregular",
    "windowed": False, "window_sinks": False, "decode": False, "needs_grad": False, "dropout": False, "softcap": False,
    "sink_logits": False, "bias": False, "need_lse": False, "compiling": True, "keys": 4096,
    "pairs": 1 << 31, "device_index": 0,
}  # fmt: skip
PLAN = {"head_windows": True, "kind": "causal"}


@needs_tracing
@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, "sdpa"), ({"needs_grad": True}, "sdpa"), ({"needs_grad": True, "kind": "causal"}, "sdpa"),
        ({"needs_grad": True, "dtype": torch.float16, "windowed": True}, "sdpa"),
        ({"windowed": True, "kind": "window"}, "sdpa"), ({"kind": "causal"}, "sdpa"),
        ({"decode": True, "kind": "ragged", "pairs": 1 << 20}, "triton"), (PLAN, None),
        (PLAN | {"needs_grad": True}, None), (PLAN | {"decode": True}, "triton"),
    ],
)  # fmt: skip
def test_a_graph_is_whole(sm: int, changes: dict[str, Any], taken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = torch.compiler.assume_constant_result(lambda index: sm)
    monkeypatch.setattr(capability_module, "_sm_while_tracing", asked)
    spec = CallSpec(**CALL | changes)
    names = tuple(select.BACKENDS)

    def place(x: torch.Tensor) -> torch.Tensor:
        found = select.serving(spec)
        return x + (-1 if found is None else names.index(found.name))

    torch._dynamo.reset()
    found = torch.compile(place, backend="eager", fullgraph=True)(torch.zeros(()))
    assert (*names, None)[int(found)] == taken
