"""Compiled models: graphs that are kept as they are made, and traced calls that are chosen for as on a CUDA device."""

from typing import Any, Self

import pytest
import torch
import transformers as tf

from adaattn_hf.attention.kind import CallKind
from adaattn_hf.backends import select
from adaattn_hf.backends.triton import TritonBackend


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.found.append(graph)
        return graph.forward

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @property
    def nodes(self) -> list[Any]:
        return [node for graph in self.found for node in graph.graph.nodes]

    @property
    def called(self) -> list[str]:
        return [str(node.target) for node in self.nodes if node.op.startswith("call")]

    @property
    def asks_of_the_host(self) -> list[str]:
        asks = ("item", "tolist", "cpu", "nonzero")
        return [name for name in self.called if name.split(".")[-1] in asks or "local_scalar" in name]


def compiled_by(backend: Any) -> tf.CompileConfig:
    """What makes `generate` compile its steps by a backend of torch, on a processor too."""
    config = tf.CompileConfig(backend=backend, fullgraph=True, dynamic=None, mode=None)
    config._compile_all_devices = True  # type: ignore[assignment]
    return config


CUDA = torch.device("cuda")


def choose_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced calls are chosen for as if the processor's tensors lay on a CUDA device; all others as they are."""
    refusals, order = TritonBackend.refusals, select.order

    def there(spec: CallKind) -> CallKind:
        return spec._replace(device=CUDA) if spec.compiling else spec

    monkeypatch.setattr(TritonBackend, "refusals", lambda self, spec: refusals(self, there(spec)))
    monkeypatch.setattr(select, "order", lambda spec: order(there(spec)))
