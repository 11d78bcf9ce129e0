"""The backend against the oracle, over structures."""

import copy
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import COMPILING, DROPOUT, GRAD, HEAD_INT8, HEAD_WINDOWS, OPAQUE, PER_HEAD, STORED
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native.backend import NativeBackend
from adaattn_hf.backends.native.library import missing
from adaattn_hf.backends.native.rules import find_rules

from ..support.calls import attended, call_over
from ..support.head_rules import rules

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")
SEGMENTS = torch.tensor([[0] * 30 + [1] * 41 + [2] * 29, [0] * 99 + [1]])
PADDED = torch.arange(100)[None] >= torch.tensor([[17], [0]])
TWO = 2
STRUCTURES = {
    "full": MaskStructure(TWO, 100, 100),
    "causal": MaskStructure(TWO, 100, 100, causal=True),
    "suffix": MaskStructure(TWO, 40, 100, causal=True, q_offset=60),
    "behind": MaskStructure(TWO, 40, 100, causal=True, q_offset=-20),
    "window": MaskStructure(TWO, 100, 100, causal=True, window=13, sinks=3),
    "both ways": MaskStructure(TWO, 100, 100, window=13, sinks=3),
    "left padding": MaskStructure(TWO, 100, 100, causal=True, key_padding=PADDED),
    "right padding": MaskStructure(TWO, 100, 100, key_padding=PADDED.flip(1)),
    "padded window": MaskStructure(TWO, 100, 100, causal=True, window=9, sinks=2, key_padding=PADDED),
    "packed": MaskStructure(TWO, 100, 100, causal=True, q_segments=SEGMENTS, k_segments=SEGMENTS),
    "chunked": MaskStructure(TWO, 100, 100, causal=True, chunk=32, chunk_start=torch.tensor([3, 0])),
    "chunked with sinks": MaskStructure(TWO, 100, 100, causal=True, window=9, sinks=4, chunk=32),
    "spans": MaskStructure(TWO, 100, 100, causal=True, spans=(torch.arange(100) // 10 - 5).expand(2, 100)),
    "mask": MaskStructure(TWO, 100, 100, mask=torch.arange(10_000).reshape(1, 1, 100, 100) % 7 > 2),
    "nothing": MaskStructure(TWO, 100, 100, mask=torch.zeros(1, 1, 1, 100, dtype=torch.bool)),
    "device offset": MaskStructure(TWO, 1, 100, causal=True, q_offset=torch.tensor(70)),
}


def call(structure: MaskStructure, dtype: torch.dtype = torch.float32, **extra: Any) -> AttentionCall:
    return call_over(structure, 24, dtype=dtype, scaling=0.2, need_lse=True, **extra)


def test_windows_of_heads_hold_beside_a_mask_of_each_head() -> None:
    mask = torch.rand(1, 4, 100, 100, generator=torch.Generator().manual_seed(0)) > 0.2
    asked = call(MaskStructure(TWO, 100, 100, causal=True, window=40, mask=mask), per_head=rules((9, 0), (2, 0)))
    result, truth = attended(NativeBackend(), asked), reference.attention(asked)
    torch.testing.assert_close(result.out.double(), truth.out, atol=2e-6, rtol=0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_structure_tells_the_kernels_of_its_own_tensors(
    copied: Callable[[MaskStructure], MaskStructure],
) -> None:
    structure = STRUCTURES["packed"].with_changes()
    asked = call(structure)
    expected = attended(NativeBackend(), asked).out
    theirs = copied(structure)
    assert torch.equal(attended(NativeBackend(), replace(asked, structure=theirs)).out, expected)
    table, told = theirs.cached(find_rules).segments, theirs.cached(find_rules).visible
    assert table is not None
    assert table.data_ptr() in struct.unpack_from("=Q", told)
    assert table is not structure.cached(find_rules).segments


REFUSALS = {
    "run on CPUs, got cuda tensors": {"device": torch.device("cuda")},
    "compute in float32, bfloat16 or float16, got float64": {"dtype": torch.float64},
    "tensors that trace, wrap or shard": {"features": OPAQUE},
    "have no dropout": {"features": DROPOUT},
    "read stored keys and values without a gradient": {"features": STORED | GRAD},
    "outside of graphs": {"features": STORED | COMPILING},
    "no gradient of rules per head": {"features": HEAD_WINDOWS | PER_HEAD | GRAD},
    "while a graph is traced": {"features": HEAD_WINDOWS | PER_HEAD | COMPILING},
    "without int8 products": {"features": STORED | HEAD_INT8 | PER_HEAD},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refuses_with_the_reason(reason: str) -> None:
    """What the host's processor lacks comes on top; it has a test beside its own subject, as ONNX has."""
    spec = call(STRUCTURES["causal"]).checked_kind()
    assert NativeBackend().refusals(spec) == ()
    refusals = NativeBackend().refusals(spec._replace(**REFUSALS[reason]))
    (said,) = (refusal for refusal in refusals if "this processor runs" not in refusal)
    assert reason in said
