"""The Triton kernels under Triton's interpreter, against the reference; on a device they run in `tests/gpu`."""

import gc
import importlib.util
import weakref
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.kind import BIAS, COMPILING, DROPOUT, HEAD_INT8, HEAD_UNTIL, PAGES, STORED, WINDOW
from adaattn_hf.attention.runs import Runs, aligned_runs
from adaattn_hf.attention.structure import MaskStructure, Segment
from adaattn_hf.backends.triton import TritonBackend

from ..support.calls import attended
from ..support.on_device import shifted
from ..support.warm import WarmInterpreter

OLD = importlib.util.find_spec("triton") is None or Version(metadata.version("triton")) < Version("3.7")
interpreted = pytest.mark.skipif(
    OLD or torch.cuda.is_available(),
    reason="needs triton 3.7, whose interpreter knows NumPy 2, and no CUDA device: there the kernels are compiled",
)

pytestmark = pytest.mark.usefixtures("bulk_always")

N = 70
LEFT = torch.ones(2, N, dtype=torch.bool)
LEFT[0, :33] = False
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 40, 20]))[None]
INPUTS = ("query", "key", "value")
NOTHING = torch.zeros(1, 4, dtype=torch.bool)
STRUCTURES = {
    "full": MaskStructure(2, N, N),
    "cross": MaskStructure(2, 17, N),
    "causal": MaskStructure(2, N, N, causal=True),
    "suffix": MaskStructure(2, 20, N, causal=True, q_offset=50),
    "window": MaskStructure(2, N, N, causal=True, window=9),
    "window both ways": MaskStructure(2, N, N, window=9),
    "few sinks": MaskStructure(2, N, N, causal=True, window=9, sinks=3),
    "many sinks": MaskStructure(2, N, N, causal=True, window=9, sinks=40),
    "sinks both ways": MaskStructure(2, N, N, window=9, sinks=3),
    "left padding": MaskStructure(2, N, N, causal=True, key_padding=LEFT),
    "documents": MaskStructure(1, N, N, causal=True, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
    "chunks": MaskStructure(2, N, N, causal=True, chunk=16),
    "decode": MaskStructure(2, 1, N, causal=True, q_offset=N - 1),
    "padded decode": MaskStructure(2, 1, N, causal=True, q_offset=N - 1, key_padding=LEFT),
    "windowed decode": MaskStructure(2, 1, N, causal=True, q_offset=N - 1, window=20, sinks=2),
    "static cache": MaskStructure(2, 1, N, causal=True, q_offset=torch.tensor(40)),
    "one row empty": MaskStructure(
        2, 1, N, causal=True, q_offset=N - 1, key_padding=torch.stack([LEFT[0] & False, LEFT[1]])
    ),
    "nothing to see": MaskStructure(1, 4, 4, causal=True, key_padding=NOTHING),
    "requests": Runs.of(aligned_runs((0, 5, 25), (0, 30, N), 25, N, True), 1, 25, N, True, 9),
    "steps of requests": Runs.of([Segment(0, 0, 1, 0, 30, 29), Segment(1, 0, 1, 30, 40, 39)], 2, 1, N, True, None),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sink logits": {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def attend(call: AttentionCall) -> AttentionResult:
    """By the Triton kernel of the call's kind."""
    return attended("triton", call)


def make(
    structure: MaskStructure,
    heads: int,
    kv_heads: int,
    dim: int,
    dim_v: int,
    dtype: torch.dtype = torch.half,
    **extra: Any,
) -> AttentionCall:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(structure.batch, structure.q_len, heads, dim, generator=g).to(dtype).transpose(1, 2)
    k = torch.randn(structure.batch, kv_heads, structure.kv_len, dim, generator=g).to(dtype)
    v = torch.randn(structure.batch, kv_heads, structure.kv_len, dim_v, generator=g).to(dtype)
    return AttentionCall(q, k, v, structure, scaling=0.3, **{"need_lse": True, **extra})


def on_processors(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are shared out as on a device of so many multiprocessors, two programs to each."""
    from adaattn_hf.backends.triton import launch, step

    facts = launch.device_facts(torch.device("cpu"))._replace(processors=count)
    monkeypatch.setattr(step, "device_facts", lambda device: facts)


def check(call: AttentionCall, atol: float = 4e-3) -> None:
    result, truth = attend(call), reference.attention(call)
    torch.testing.assert_close(result.out.double(), truth.out, atol=atol, rtol=0)
    assert result.lse is not None
    torch.testing.assert_close(result.lse.double(), truth.lse, atol=atol / 2, rtol=0)


@interpreted
@pytest.mark.parametrize("name", STRUCTURES)
def test_equals_reference(name: str) -> None:
    check(make(STRUCTURES[name], 4, 2, 16, 16))


@interpreted
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", ["left padding", "few sinks", "padded decode", "nothing to see", "one row empty"])
def test_other_mathematics(name: str, extra: str) -> None:
    """Odd head sizes, values wider than keys, one query head per key/value head."""
    check(make(STRUCTURES[name], 4, 4, 24, 40, **EXTRAS[extra]))


@interpreted
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", [name for name, s in STRUCTURES.items() if s.q_len == 1])
def test_a_query_in_single_precision(name: str, extra: str) -> None:
    check(make(STRUCTURES[name], 4, 2, 24, 40, torch.float32, **EXTRAS[extra]), atol=4e-6)


@interpreted
def test_a_scaling_of_zero_weighs_all_that_is_seen_alike() -> None:
    call = make(STRUCTURES["left padding"], 2, 2, 16, 16)
    call.scaling = 0.0
    check(call)


@interpreted
@pytest.mark.parametrize("name", ["left padding", "few sinks of padded rows", "nothing to see"])
def test_the_kernel_itself_writes_rows_that_see_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    structure = STRUCTURES["few sinks"].with_changes(key_padding=LEFT)
    call = make(STRUCTURES.get(name, structure), 4, 2, 16, 16, sink_logits=torch.zeros(4))
    empty = Tensor.new_empty
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", lambda *args, **kw: empty(*args, **kw).fill_(7.0))
        check(call)


@interpreted
def test_many_shares_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence and key/value head cut into more shares than one step of the merge holds."""
    on_processors(16, monkeypatch)
    check(make(MaskStructure(1, 1, 5000, causal=True, q_offset=4999), 2, 1, 16, 16, torch.float32), atol=4e-6)


@interpreted
def test_calls_over_one_structure_may_differ() -> None:
    """What is remembered with a structure belongs to the sizes, strides and numbers of the call that made it."""
    structure = MaskStructure(2, N, N, causal=True)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    calls = [
        make(structure, 4, 2, 32, 32), make(structure, 4, 4, 32, 64), make(structure, 4, 2, 32, 32, softcap=1.5),
        make(structure, 4, 2, 32, 32, sink_logits=sinks), replace(make(structure, 4, 2, 32, 32), scaling=0.7),
        replace(make(structure, 4, 2, 32, 32), scaling=-0.7), make(structure, 4, 2, 32, 32, need_lse=False),
    ]  # fmt: skip
    for one in (*calls, *calls):
        result, truth = attend(one), reference.attention(one)
        torch.testing.assert_close(result.out.double(), truth.out, atol=4e-3, rtol=0)
        assert (result.lse is not None) == one.need_lse


@interpreted
@pytest.mark.parametrize("least", [0, 10**7])
def test_small_calls_have_no_descriptors(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """The host takes longer to describe keys and values than small calls gain."""
    from adaattn_hf.backends.triton import forward

    seen: list[tuple[bool, bool]] = []
    real = forward.forward

    def noted(grid: tuple[int, int], arguments: tuple[Any, ...], constants: Any, kind: Any) -> None:
        seen.append((constants["BULK"], isinstance(arguments[3], Tensor)))
        real(grid, arguments, constants, kind)

    monkeypatch.setattr(forward, "forward", noted)
    monkeypatch.setattr(forward, "_LEAST_PRODUCTS", least)
    for length in (70, 500):
        call = make(MaskStructure(1, length, length, causal=True), 4, 2, 32, 32)
        torch.testing.assert_close(attend(call).out.double(), reference.attention(call).out, atol=4e-3, rtol=0)
    # 4 heads, 500 queries of 250 keys in the middle and 64 channels are 3e7 products, 70 queries 6e5
    assert seen == [(not least, bool(least)), (True, False)]


@interpreted
@pytest.mark.parametrize("least", [0, 1 << 40], ids=["by TMA", "by addresses"])
def test_on_a_device_calls_have_a_kind_by_which_variants_are_kept(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """Odd addresses, which TMA cannot read, and learned sinks need Triton's look; other strides are another kind."""
    from adaattn_hf.backends.triton import forward

    kinds: list[tuple[bool, Any]] = []
    real = forward.forward

    def noted(grid: Any, arguments: Any, constants: Any, kind: Any) -> None:
        kinds.append((constants["BULK"], kind))
        real(grid, arguments, constants, None)

    monkeypatch.setattr(forward, "_LEAST_PRODUCTS", least)
    monkeypatch.setattr(forward, "forward", noted)
    windows = HeadRules((9, 0), (3, 0), ("model", "model"))
    structure = STRUCTURES["left padding"].with_changes()  # which has met no kernel yet
    call = make(structure, 4, 2, 32, 32, need_lse=False, per_head=windows)
    shorter = make(MaskStructure(2, N - 1, N - 1, causal=True), 4, 2, 32, 32, need_lse=False)
    calls = [
        call, replace(call, scaling=0.1), *(replace(call, **{name: shifted(getattr(call, name))}) for name in INPUTS),
        replace(call, need_lse=True), replace(call, sink_logits=torch.zeros(4)), shorter,
        replace(call, key=call.key.transpose(1, 2).contiguous().transpose(1, 2)),
    ]  # fmt: skip
    for one in calls:
        torch.testing.assert_close(attend(one).out.double(), reference.attention(one).out, atol=4e-3, rtol=0)
    by_tma, asked = zip(*kinds, strict=True)
    assert by_tma == tuple(not least and number not in (2, 3, 4) for number in range(len(calls)))
    assert [number for number, kind in enumerate(asked) if kind is None] == [2, 3, 4, 6]
    assert asked[0] == asked[1]
    assert len({asked[0], asked[5], asked[7], asked[8]}) == 4


@interpreted
def test_a_kernel_keeps_neither_tensors_nor_the_structure() -> None:
    call = make(STRUCTURES["left padding"].with_changes(), 4, 2, 32, 32)
    kernel = TritonBackend().kernel(call.checked_kind(), None)
    kernel(call)
    kept = [weakref.ref(one) for one in (call.query, call.key, call.value, call.structure)]
    gc.disable()
    try:
        del call
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()


@interpreted
def test_very_many_documents_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along the first extent of a CUDA grid, as the others hold no more than 65,535 programs."""
    from adaattn_hf.backends.triton import tables
    from adaattn_hf.backends.triton.launch import Launcher

    count, grids = 70_000, list[tuple[int, ...]]()
    # interpreted, tables of so many documents would take hours
    monkeypatch.setattr(Launcher, "__call__", lambda self, grid, *_: grids.append(grid))
    documents = torch.arange(count)[None]
    structure = MaskStructure(1, count, count, causal=True, q_segments=documents, k_segments=documents)
    attend(make(structure, 2, 1, 16, 16))
    assert grids == [(count,), (-(-count // tables._SQUARE),), (2 * count,)]


@interpreted
def test_heads_may_begin_beyond_what_32_bits_say(interpreter: WarmInterpreter, tmp_path: Path) -> None:
    """In a process of its own, which an offset of 32 bits would end."""
    code = """
import torch
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.triton import TritonBackend

apart = (1 << 30) + 64  # of no use but to lie between the heads: that memory is never touched
room = torch.empty(2 * apart + 20 * 16, dtype=torch.half)
far = room.as_strided((1, 3, 20, 16), (3 * apart, apart, 16, 1)).copy_(torch.randn(1, 3, 20, 16))
near = torch.randn(1, 3, 20, 16).half()
for structure in (MaskStructure(1, 20, 20, causal=True), MaskStructure(1, 1, 20)):
    for query, key, value in ((near, far, near), (near, near, far), (far, near, near)):
        call = AttentionCall(query[:, :, : structure.q_len], key, value, structure, 0.3)
        kernel = TritonBackend().kernel(call.checked_kind(), None)
        error = (kernel(call).out.double() - reference.attention(call).out).abs().amax()
        assert error < 4e-3, (structure, error)
"""
    done = interpreter.run(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@interpreted
@pytest.mark.parametrize(
    "structure",
    [
        MaskStructure(1, 40, 40, causal=True, key_padding=torch.arange(40)[None] != 1),
        MaskStructure(1, 40, 40, causal=True, chunk=8, window=4, sinks=1),
    ],
    ids=["holes", "sinks and chunks"],
)
def test_what_is_not_made_of_runs_is_an_error(structure: MaskStructure) -> None:
    """Sinks count from the first key of a sequence, which a run that begins at a chunk's border does not know."""
    with pytest.raises(ValueError, match="expected runs"):
        attend(make(structure, 2, 2, 16, 16))


REFUSALS: dict[str, dict[str, Any]] = {
    "CUDA devices": {"device": torch.device("cpu")}, "float16 or bfloat16": {"dtype": torch.float32},
    "up to 256": {"head_dim_v": 288}, "no int8 products per head": {"features": HEAD_INT8},
    "no dropout": {"features": DROPOUT}, "stored as int8": {"features": STORED}, "additive bias": {"features": BIAS},
    "dense mask": {"shape": "irregular"}, "traced": {"features": COMPILING},
    "up to a position per head": {"features": HEAD_UNTIL | PAGES | WINDOW},
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSALS)
def test_refuses_with_the_reason(reason: str) -> None:
    plain = make(STRUCTURES["causal"], 4, 2, 16, 16, need_lse=False).checked_kind()
    kind, backend = plain._replace(device=torch.device("cuda")), TritonBackend()
    assert backend.refusals(kind) == ()
    assert any(reason in r for r in backend.refusals(kind._replace(**REFUSALS[reason])))


def test_says_when_triton_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert TritonBackend().missing() == ("triton is not installed",)
