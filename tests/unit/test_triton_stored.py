"""Decode over a cache of codes in the Triton kernels, under Triton's interpreter, against what the codes mean."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadWindows
from adaattn_hf.attention.kind import HEAD_WINDOWS, PER_HEAD, CallKind
from adaattn_hf.attention.stored import StoredKV, hadamard, quantise
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import order
from adaattn_hf.backends.triton import TritonBackend

from ..support.head_rules import rules
from ..support.operators import NamedOperators
from .test_triton import LEFT, STRUCTURES, N, attend, interpreted, make

pytest.importorskip("triton")

from adaattn_hf.backends.triton import codes, decode, ops, step, tiling

LONG = MaskStructure(2, 1, 1500, causal=True, q_offset=1499)
STEPS = [name for name, structure in STRUCTURES.items() if structure.q_len == 1]


def stored(call: AttentionCall, bits: int, *, mean: bool = True, first: bool = True) -> Any:
    """The call over codes of its keys, as a cache makes them; itself for 0 bits."""
    if not bits:
        return call
    key, value = call.key.float(), call.value.float()
    middle = key.mean(dim=2) * 3
    own = (middle @ hadamard(key.shape[3])).contiguous() if mean else None
    keys, key_scale = quantise(key, mean=own)
    values, value_scale = quantise(value, bits=bits)
    record = StoredKV(key_scale, value_scale, own, key[:, :, 0].contiguous() if first else None)
    return AttentionCall(
        call.query, keys, values, call.structure, call.scaling, softcap=call.softcap,
        sink_logits=call.sink_logits, need_lse=True, per_head=call.per_head, stored=record,
    )  # fmt: skip


def check(call: AttentionCall, bits: int, atol: float = 2e-5, **how: bool) -> None:
    asked = stored(call, bits, **how)
    result, truth = attend(asked), reference.attention(asked.dequantised())
    torch.testing.assert_close(result.out.double(), truth.out, atol=atol, rtol=0)
    assert result.lse is not None
    assert result.out.dtype is call.query.dtype
    torch.testing.assert_close(result.lse.double(), truth.lse, atol=atol, rtol=0)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [*STEPS, "decode, large heads", "padded decode, large heads"])
def test_every_step_reads_codes(name: str, bits: int) -> None:
    """Of large heads a tile holds fewer keys, but as many a warp."""
    kind, _, large = name.partition(", ")
    check(make(STRUCTURES[kind], 4, 2, *((256, 256) if large else (32, 64)), torch.float32), bits)


@interpreted
@pytest.mark.parametrize("dim", [64, 96])
def test_no_matrix_turns_queries_in_fp32_or_where_memory_is_short(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of as many channels as a head, padded, has, and smaller ones; only outputs in half precision need one."""
    monkeypatch.setattr(codes, "rotated", None)
    for tile in (*tiling.SIZES["decode_codes 8"], tiling.Tile(1024, 0, 1, 64, 2, 2, sums=True)):
        monkeypatch.setitem(tiling.SIZES, "decode_codes 8", (tile,))
        if tile.sums:
            check(make(STRUCTURES[STEPS[0]], 4, 2, dim, dim, torch.float16), 8, atol=4e-3)
    monkeypatch.setattr(decode, "rotated", None)
    check(make(STRUCTURES[STEPS[0]], 4, 2, dim, dim, torch.float32), 8)
    monkeypatch.undo()
    check(make(STRUCTURES[STEPS[0]], 4, 2, dim, dim, torch.float32), 4)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("how", [{"mean": False}, {"first": False}, {"mean": False, "first": False}], ids=str)
def test_without_a_mean_or_a_first_key(how: dict[str, bool], bits: int) -> None:
    check(make(STRUCTURES["padded decode"], 6, 2, 48, 32, torch.float32), bits, **how)


@interpreted
@pytest.mark.parametrize(("seen", "bits", "dtype"), [
    (seen, bits, (torch.float32, torch.half)[(at + bits // 4) % 2])
    for at, seen in enumerate((1500, 769, 60)) for bits in (8, 4)
])  # fmt: skip
def test_rows_that_adjoin_are_read_in_whole_tiles(seen: int, bits: int, dtype: torch.dtype) -> None:
    """The last tile of a share goes back over keys that were read before, or ends behind the last of too few."""
    asked = MaskStructure(2, 1, 1500, causal=True, q_offset=torch.tensor(seen - 1))
    check(make(asked, 8, 2, 64, 64, dtype), bits, 2e-5 if dtype is torch.float32 else 4e-3)


@interpreted
@pytest.mark.parametrize("sequences", [1, 8, 50])
@pytest.mark.parametrize("windows", [None, ((32768, 0), (1024, 16)) * 4])
def test_no_more_shares_than_run_at_once(windows: HeadWindows | None, sequences: int) -> None:
    """Unless each head of each sequence takes one already; one more share of the longest heads would be too many."""
    most, span = step.split(windows, 8, ((128, sequences),), 396, 256)
    counts = [32768] * 8 if windows is None else [32768, 1040] * 4
    shares = [-(-count // span) for count in counts]
    assert max(shares) == most
    assert sum(shares) * sequences <= max(396, 8 * sequences)
    wider = -(-32768 // (most + 1))
    assert sum(-(-count // wider) for count in counts) * sequences > 396


@interpreted
@pytest.mark.parametrize("windows", [None, ((1 << 30, 0), (1024, 16)) * 4])
@pytest.mark.parametrize("lengths", [(128, *(8,) * 7), (8,) * 8, (128,), (9, 8, 8, 9, 10, 11, 8, 8)], ids=str)
def test_requests_of_any_lengths_fill_the_device(windows: HeadWindows | None, lengths: tuple[int, ...]) -> None:
    """264 programs run at once on an H100; shares are of the longest call, and not of all that lie in its row."""
    spans = tuple((length, lengths.count(length)) for length in sorted(set(lengths)))
    most, span = step.split(windows, 8, spans, 264, 256)
    heads = (1 << 30,) * 8 if windows is None else (1 << 30, 1040) * 4
    reads = [min(head, 256 * length) for length in lengths for head in heads]
    assert most == -(-max(reads) // span)
    shares = [-(-keys // span) for keys in reads]
    assert sum(shares) <= 264
    assert sum(shares) > 264 * 3 // 4


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
def test_shares_of_heads_with_windows_of_their_own(bits: int) -> None:
    check(make(LONG, 4, 2, 32, 32, torch.float32, per_head=rules((300, 0), (7, 0))), bits)


@interpreted
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("per_head", [rules((300, 0), (7, 0)), None], ids=["windows", "exact"])
def test_a_graph_merges_heads_side_by_side(per_head: Any, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a launch of its own in place of one that sets counters to zero; of few keys there is nothing to merge."""
    merge, launches = decode.combine, list[tuple[int, ...]]()

    def noting(grid: tuple[int, ...], *more: Any) -> None:
        launches.append(grid)
        merge(grid, *more)

    monkeypatch.setattr(step, "combine", noting)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for keys in (1500, 200):
        structure = MaskStructure(1, 1, keys, causal=True, q_offset=keys - 1)
        asked = stored(make(structure, 4, 2, 32, 64, torch.float32, per_head=per_head, sink_logits=sink), bits)
        torch.testing.assert_close(ops.traced_step(asked), attend(asked).out, atol=2e-6, rtol=0)
    assert launches == [(1, 4)]


@interpreted
@pytest.mark.parametrize("extra", [{"softcap": 1.5}, {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=str)
def test_a_mean_is_not_lost_where_a_shift_of_all_scores_counts(extra: dict[str, Any]) -> None:
    check(make(STRUCTURES["decode"], 4, 2, 32, 32, torch.float32, **extra), 8)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
def test_half_precision(bits: int) -> None:
    """The interpreter has no bfloat16; `tests/gpu` has."""
    check(make(STRUCTURES["decode"], 4, 2, 32, 32), bits, 1e-2)


@interpreted
def test_no_bit_of_a_query_or_a_key_is_lost() -> None:
    """The score of the only key seen, in half precision: a query errs by half of 2^-15 of its largest channel."""
    alone = MaskStructure(16, 1, N, causal=True, q_offset=0)
    asked = stored(make(alone, 4, 2, 32, 64), 8, first=False)
    own = asked.stored.keys(asked.key, torch.float32)[:, :, 0].double().repeat_interleave(2, dim=1)
    query = asked.query[:, :, 0].double()
    turn = hadamard(32).double()  # a query is rounded as it is multiplied: turned
    codes_only = own @ turn - asked.stored.key_mean.double().repeat_interleave(2, dim=1)
    bound = 0.3 * (query @ turn).abs().amax(2) / 65024 * codes_only.abs().sum(2) + 1e-5
    lse = attend(asked).lse
    assert lse is not None
    error = (lse[:, :, 0].double() - 0.3 * (query * own).sum(2)).abs()
    assert (error <= bound).all(), (error / bound).max()


@interpreted
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("bits", [8, 4])
def test_no_bit_of_a_value_is_lost(bits: int, size: float) -> None:
    """The output of the only key seen is its value, far within the step between two codes, however large values are."""
    alone = MaskStructure(16, 1, N, causal=True, q_offset=0)
    call = make(alone, 4, 2, 32, 64, torch.half)
    call.value = call.value.float() * size
    asked = stored(call, bits)
    value = asked.dequantised().value[:, :, 0].double().repeat_interleave(2, dim=1)
    apart = value.abs().amax(2, keepdim=True) / (127 if bits == 8 else 15)
    assert ((attend(asked).out[:, 0].double() - value).abs() <= apart / 8).all()


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # NumPy says so of what is tested
def test_a_query_that_is_no_number_gives_none() -> None:
    call = make(STRUCTURES["decode"], 4, 2, 32, 64)
    call.query[0, 1, 0, 3] = torch.inf
    call.query[1, 2, 0, 5] = torch.nan
    out = attend(stored(call, 8)).out[:, 0]
    lost = out.isnan().any(2)
    assert lost.tolist() == [[False, True, False, False], [False, False, True, False]]


@interpreted
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_launch_and_one_allocation(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer but the first, which makes the tables: nothing else is asked of the device."""
    asked = stored(make(STRUCTURES[name], 4, 2, 32, 64, per_head=rules((300, 0), (7, 0))), bits)
    asked.need_lse = False
    attend(asked)
    launches: list[str] = []
    for kernel in ("decode", "decode_codes"):
        monkeypatch.setattr(step, kernel, lambda *arguments, kernel=kernel: launches.append(kernel))
    with NamedOperators() as noted:
        attend(asked)
    assert launches == ["decode_codes" if bits else "decode"]
    assert noted.names == ["aten::empty"]


@interpreted
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_kernel_serves_every_length_of_its_kind(bits: int) -> None:
    """The kernel of a first call serves the next ones, whatever their windows."""
    longer = STRUCTURES["decode"].with_changes(kv_len=300, q_offset=299)
    first, second = (stored(make(one, 4, 2, 32, 64), bits) for one in (STRUCTURES["decode"], longer))
    kernel = TritonBackend().kernel(first.checked_kind(), None)
    for asked in (first, second, replace(second, per_head=rules((100, 0), (7, 0)))):
        assert torch.equal(kernel(asked).out, attend(asked).out)


@interpreted
@pytest.mark.parametrize("bits", [8, 4])
def test_counters_are_left_as_they_were_found(bits: int) -> None:
    asked = stored(make(MaskStructure(1, 1, 1500, causal=True, q_offset=1499), 2, 1, 32, 32), bits)
    first, again = attend(asked).out, attend(asked).out
    assert torch.equal(first, again)
    (_, counters) = step._buffers[torch.device("cpu"), 0]
    assert not counters.any()


def test_what_is_served_and_what_is_refused() -> None:
    def kind_of(structure: MaskStructure, bits: int = 8) -> CallKind:
        asked: AttentionCall = replace(stored(make(structure, 4, 2, 32, 32), bits), need_lse=False)
        return asked.checked_kind()._replace(device=torch.device("cuda"))

    def reasons(kind: CallKind) -> str:
        return " ".join(TritonBackend().refusals(kind))

    one = kind_of(STRUCTURES["decode"])
    assert reasons(one) == ""
    assert order(one)[0] == order(one._replace(features=one.features | HEAD_WINDOWS | PER_HEAD))[0] == "triton"
    assert reasons(kind_of(MaskStructure(2, 1, N, causal=True, q_offset=N - 1, key_padding=LEFT), 4)) == ""
    assert "stored as int8 for one query" in reasons(kind_of(STRUCTURES["suffix"]))
    assert "two channels at a time, got a value head size of 33" in reasons(one._replace(head_dim_v=33))
