"""No known structure costs memory in proportion to the area of its mask, forward or backward."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select

from ..support.operators import Largest

LENGTH = 2048


def padded(n: int, holes: bool = False) -> MaskStructure:
    padding = torch.ones(2, n, dtype=torch.bool)
    padding[0, : n // 3] = False
    if holes:
        padding[1, n // 2] = False
    return MaskStructure(2, n, n, causal=True, key_padding=padding)


def documents(n: int) -> MaskStructure:
    numbers = torch.arange(8).repeat_interleave(n // 8)[None]
    return MaskStructure(1, n, n, causal=True, q_segments=numbers, k_segments=numbers)


KNOWN: dict[str, Callable[[int], MaskStructure]] = {
    "none": lambda n: MaskStructure(1, n, n), "causal": lambda n: MaskStructure(1, n, n, causal=True),
    "window": lambda n: MaskStructure(1, n, n, causal=True, window=n // 8),
    "window with sinks": lambda n: MaskStructure(1, n, n, causal=True, window=n // 8, sinks=4),
    "window both ways": lambda n: MaskStructure(1, n, n, window=n // 16),
    "chunks": lambda n: MaskStructure(1, n, n, causal=True, chunk=n // 4), "padding": padded,
    "padding with holes": lambda n: padded(n, holes=True),
    "padding and window": lambda n: padded(n).with_changes(window=n // 8),
    "keys padded": lambda n: padded(n).with_changes(causal=False), "documents": documents,
    "documents and window": lambda n: documents(n).with_changes(window=64),
    "static cache": lambda n: MaskStructure(1, 64, n, causal=True, q_offset=torch.tensor(n // 2)),
    "chunked prefill": lambda n: MaskStructure(1, n // 2, n, causal=True, q_offset=n // 2),
}  # fmt: skip


def largest(name: str, structure: MaskStructure, *, gradient: bool) -> int:
    """Most elements in one result, with a single narrow head so that nothing hides behind the inputs."""
    tensors = [
        torch.randn(structure.batch, 1, length, 4, requires_grad=gradient)
        for length in (structure.q_len, structure.kv_len, structure.kv_len)
    ]
    call = AttentionCall(*tensors, structure, 0.5)
    with Largest() as seen:
        out = select.attend(call, None if name == "chosen" else name).out
        if gradient:
            torch.autograd.grad(out.sum(), tensors)
    return int(seen.elements)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", list(KNOWN))
@pytest.mark.parametrize("name", ["sdpa", "chosen"])
def test_no_tensor_of_a_quarter_of_the_mask(name: str, case: str, gradient: bool) -> None:
    assert largest(name, KNOWN[case](LENGTH), gradient=gradient) < LENGTH**2 // 4


def test_the_count_notices_a_dense_mask() -> None:
    """The backend that keeps the score matrix is caught."""
    assert largest("eager", KNOWN["causal"](LENGTH), gradient=False) >= LENGTH**2 // 4


@pytest.mark.parametrize("case", list(KNOWN))
@pytest.mark.parametrize("name", ["sdpa", "eager", "chosen"])
def test_a_structure_goes_with_its_call(name: str, case: str) -> None:
    """What was derived from it does not hold it, or tables of every pass would wait for the garbage collector."""
    structure = KNOWN[case](64)
    tensors = (torch.randn(structure.batch, 1, n, 4) for n in (structure.q_len, structure.kv_len, structure.kv_len))
    call = AttentionCall(*tensors, structure, 0.5)
    select.attend(call, None if name == "chosen" else name)
    gone = weakref.ref(structure)
    gc.disable()
    try:
        del structure, call
        assert gone() is None
    finally:
        gc.enable()
