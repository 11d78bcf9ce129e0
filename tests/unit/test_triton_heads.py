"""Windows and sinks per key/value head in the Triton kernels, under Triton's interpreter, against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.runs import Runs
from adaattn_hf.attention.structure import MaskStructure, Segment
from adaattn_hf.backends.triton import TritonBackend

from ..support.head_rules import rules
from .test_triton import EXTRAS, STRUCTURES, check, interpreted, make, on_processors

pytestmark = pytest.mark.usefixtures("bulk_always")

STEP = MaskStructure(3, 1, 3000, causal=True, q_offset=2999)
RULES = {
    "every second head": rules((0, 8), (0, 3)),
    "all heads": rules((5, 30), (2, 0)),
    "a window as long as the call": rules((70, 9), (0, 40)),
}


SERVED = [name for name, s in STRUCTURES.items() if s.window is None and s.sinks_at_runs]


@interpreted
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("rule", RULES)
def test_heads_of_other_windows_equal_the_reference(name: str, rule: str) -> None:
    check(make(STRUCTURES[name], 4, 2, 32, 32, per_head=RULES[rule]))


@interpreted
@pytest.mark.parametrize("name", ["window", "few sinks", "windowed decode", "window both ways"])
def test_a_model_with_a_window_may_have_heads_with_less(name: str) -> None:
    """A head without a rule keeps the model's own window and sinks."""
    check(make(STRUCTURES[name], 6, 3, 32, 32, per_head=rules((0, 4, 70), (5, 5, 5))))


@interpreted
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", ["left padding", "padded decode", "documents"])
def test_other_mathematics(name: str, extra: str) -> None:
    check(make(STRUCTURES[name], 4, 4, 24, 40, per_head=rules((0, 3, 12, 1), (0, 2, 0, 5)), **EXTRAS[extra]))


@interpreted
def test_windows_and_sinks_may_be_longer_than_a_table_can_say() -> None:
    check(make(STRUCTURES["causal"], 4, 2, 32, 32, per_head=rules((8, 1 << 40), (0, 1 << 50))))
    check(make(STRUCTURES["sinks both ways"].with_changes(sinks=1 << 50), 4, 2, 32, 32))


@interpreted
@pytest.mark.parametrize("width", [32, 64, 128])
def test_tiles_by_tma(width: int) -> None:
    """Head sizes that are powers of two are read by descriptors; keys and values in caches of any order."""
    call = make(MaskStructure(2, 300, 300, causal=True), 2, 2, width, width, per_head=rules((0, 150), (0, 4)))
    check(call)
    key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (call.key, call.value))
    check(replace(call, key=key, value=value))


@interpreted
def test_a_thousand_tokens_and_a_window_of_three_hundred() -> None:
    check(make(MaskStructure(1, 1000, 1000, causal=True), 2, 2, 32, 32, per_head=rules((300, 0), (7, 0))))


@interpreted
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_steps_read_the_keys_of_their_head(kv_heads: int) -> None:
    """Shares of a long head and of windowed ones, more than the merge holds at once, odd batch."""
    windows = (0, 300, 1, 2000)[:kv_heads]
    check(make(STEP, 4, kv_heads, 16, 16, torch.float32, per_head=rules(windows, (0, 7, 4, 900)[:kv_heads])), 4e-6)


@interpreted
@pytest.mark.parametrize("windows", [(0, 0), (0, 300)])
def test_a_long_request_beside_short_ones(windows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a batch, whose keys lie in one row: each has shares by its own keys, the longest the most."""
    from adaattn_hf.backends.triton import step
    from adaattn_hf.backends.triton.decode import decode as run

    lengths, runs, first = (300, 2000, 1, 260), [], 0
    for row, length in enumerate(lengths):
        runs.append(Segment(row, 0, 1, first, length, length - 1))
        first += length
    structure = Runs.of(runs, len(lengths), 1, first + 7, True, None)
    seen: list[tuple[tuple[int, ...], int]] = []

    def launched(grid: tuple[int, ...], arguments: tuple[Any, ...], *rest: Any) -> None:
        seen.append((grid, arguments[28]))
        run(grid, arguments, *rest)

    monkeypatch.setattr(step, "decode", launched)
    on_processors(16, monkeypatch)
    each = rules(windows, (0, 7)) if any(windows) else None
    check(make(structure, 4, 2, 16, 16, torch.float32, per_head=each), 4e-6)
    ((grid, span),) = seen
    reads = [min(length, window + 7 if window else length) for length in lengths for window in windows]
    assert grid == (4, 2 * -(-2048 // span))
    assert 16 < sum(-(-keys // span) for keys in reads) <= 32


@interpreted
def test_a_step_in_a_static_cache_does_not_look_at_its_offset() -> None:
    """An offset that raises when the host asks for it, as one does in a CUDA graph that is being captured."""

    class Unread(torch.Tensor):
        def __int__(self) -> int:
            raise AssertionError("the host read the offset")

    for at in (40, 69):
        structure = MaskStructure(2, 1, 70, causal=True, q_offset=torch.tensor(at))
        call = make(structure, 4, 2, 32, 32, per_head=rules((9, 0), (2, 0)))
        expected = reference.attention(call).out
        unread = structure.with_changes(q_offset=torch.tensor(at).as_subclass(Unread))
        kernel = TritonBackend().kernel(call.checked_kind(), call.per_head)
        out = kernel(replace(call, structure=unread)).out
        torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=0)


@interpreted
def test_steps_over_padding_with_holes() -> None:
    """One query reads the padding key by key: holes cost nothing."""
    real = torch.rand(3, 70, generator=torch.Generator().manual_seed(2)) > 0.3
    real[:, -1] = True
    check(make(MaskStructure(3, 1, 70, causal=True, q_offset=69, key_padding=real), 4, 2, 32, 32))
