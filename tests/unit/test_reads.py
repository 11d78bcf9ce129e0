"""What blocks of queries and of keys read, beside masks that say it key by key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from adaattn_hf.attention.heads import ALL
from adaattn_hf.attention.structure import CallStructure, Segment
from adaattn_hf.backends.remembered import Remembered
from adaattn_hf.backends.triton import tables
from adaattn_hf.backends.triton.reads import Blocks

ROWS, COLUMNS = 8, 4
WINDOWS = st.tuples(st.integers(1, 50), st.integers(0, 9)) | st.just((ALL, 0))


def visible(n: int, past: int, causal: bool, window: int) -> torch.Tensor:
    """Keys that queries see by their window alone, `[n, past + n]`."""
    distance = torch.arange(n)[:, None] + past - torch.arange(past + n)
    return (distance < window) & (distance >= 0 if causal else distance > -window)


@given(st.integers(1, 40), st.integers(0, 20), st.booleans(), WINDOWS)
def test_blocks_of_queries_read_tiles_from_the_first_key_on_that_one_of_them_sees(
    n: int, past: int, causal: bool, rule: tuple[int, int]
) -> None:
    window, sinks = rule
    blocks = Blocks(True, causal, past + n, [Segment(0, 0, n, 0, past + n, past)], (ROWS, COLUMNS))
    each, total = blocks.read(window, sinks)
    assert blocks.first.tolist() == list(range(0, n, ROWS))
    assert total == each.sum()
    seen = visible(n, past, causal, window)
    for first, count in zip(blocks.first.tolist(), each.tolist(), strict=True):
        keys = seen[first : first + ROWS].any(0).nonzero().ravel().tolist()
        start = keys[0] // COLUMNS * COLUMNS
        assert count == keys[-1] + 1 - start + min(sinks, start)


@given(st.integers(1, 40), st.booleans(), WINDOWS)
def test_blocks_of_keys_are_read_up_to_the_last_query_that_sees_one_of_them(
    n: int, causal: bool, rule: tuple[int, int]
) -> None:
    window, sinks = rule
    blocks = Blocks(False, causal, n, [Segment(0, 0, n, 0, n, 0)], (ROWS, COLUMNS))
    each, _ = blocks.read(window, sinks)
    seen = visible(n, 0, causal, window)
    for first, count in zip(blocks.first.tolist(), each.tolist(), strict=True):
        queries = seen[:, first : first + COLUMNS].any(1).nonzero().ravel().tolist()
        assert count == (n if first < sinks else queries[-1] + 1) - queries[0]


def test_layers_whose_windows_differ_share_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of all layers of a plan are made while a prompt waits, where its length is met for the first time."""
    made: list[tuple[int, int]] = []

    class Noted(Blocks):
        def _of_queries(self, window: int, sinks: int) -> NDArray[np.int64]:
            made.append((window, sinks))
            return super()._of_queries(window, sinks)

    monkeypatch.setattr(tables, "Blocks", Noted)
    monkeypatch.setattr(tables, "_lately", {})
    monkeypatch.setattr(tables, "_made", Remembered(256))
    structure = CallStructure(1, 1003, 1003, causal=True)
    segments = structure.segments() or ()
    narrow, wide = (100, 4), (300, 4)
    kind = tables.Kind("queries", (64, 64), 2, torch.device("cpu"))
    for windows in ((narrow, wide), (wide, narrow), (wide, (ALL, 0)), None):
        sheet = tables.sheet_of(kind, structure, segments)
        assert len(sheet.tables(windows).entries) == sheet.count == 32
    assert made == [narrow, wide, (ALL, 0)]


def test_tables_of_a_new_length_are_made_together_for_all_windows_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And are those that each layer would have had alone."""
    together: list[int] = []
    make = tables.Sheet.make

    def noted(sheet: tables.Sheet, windows: Any, evenly: bool = False) -> Any:
        together.append(len(windows))
        return make(sheet, windows, evenly)

    monkeypatch.setattr(tables.Sheet, "make", noted)
    monkeypatch.setattr(tables, "_lately", {})
    monkeypatch.setattr(tables, "_made", Remembered(256))
    layers = [((100, 4), (300, 4)), ((300, 4), (ALL, 0)), None, ((5, 0), (1000, 16))]
    for dealt in ((), (1, 2, 12)):
        kind = tables.Kind("queries", (64, 64), 2, torch.device("cpu"), *dealt)
        for n in (1003, 2050, 1531):
            structure = CallStructure(1, n, n, causal=True)
            segments = structure.segments() or ()
            del together[:]
            for windows in layers:
                sheet = tables.sheet_of(kind, structure, segments)
                (alone,) = make(sheet, [windows])
                found = sheet.tables(windows)
                assert not any(table.data_ptr() % 16 for table in found)
                assert found.segments.tolist() == alone.segments.tolist()
                assert windows is None or found.rules.tolist() == alone.rules.tolist()
                count = len(alone.entries)
                assert found.entries[:count].tolist() == alone.entries.tolist()
                assert (found.entries[count:, 2] == -1).all()
            assert together == ([1] * 4 if n == 1003 else [4])


@pytest.mark.parametrize("windows", [None, ((100, 4), (ALL, 0))])
@pytest.mark.parametrize("dealt", [(), (1, 2, 12)])
def test_no_runs_have_tables_of_no_entries(windows: Any, dealt: tuple[int, ...]) -> None:
    kind = tables.Kind("queries", (64, 64), 2, torch.device("cpu"), *dealt)
    found = tables.sheet_of(kind, CallStructure(1, 100, 100, causal=True), ()).tables(windows)
    assert [list(found.segments.shape), list(found.entries.shape)] == [[0, 6], [0, 3]]


def test_windows_of_another_plan_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor kept for ever."""
    monkeypatch.setattr(tables, "_lately", {})
    monkeypatch.setattr(tables, "_made", Remembered(256))
    monkeypatch.setattr(tables, "_MOST_WINDOWS", 4)
    kind = tables.Kind("queries", (64, 64), 1, torch.device("cpu"))
    plans = [[((window, 0),) for window in plan] for plan in ((10, 20), (30, 40, 20), (50, 60))]

    def made(n: int, plan: list[Any]) -> list[Any]:
        structure = CallStructure(1, n, n, causal=True)
        sheet = tables.sheet_of(kind, structure, structure.segments() or ())
        assert all(sheet.tables(windows) for windows in plan)
        return list(sheet._made)

    first, second = ([made(n + 64 * at, plan) for at, plan in enumerate(plans[:2])] for n in (100, 300))
    came_before = plans[0][0]  # with a window that both plans have
    assert first == [plans[0], [*plans[1], came_before]]
    assert second == plans[:2]
    assert made(500, plans[2]) == plans[2]
    assert list(tables._lately[kind]) == [*plans[1][1:], *plans[2]]


def test_tables_of_many_entries_are_made_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of another plan are not to keep a long prompt waiting, nor to take memory."""
    monkeypatch.setattr(tables, "_lately", {})
    monkeypatch.setattr(tables, "_made", Remembered(256))
    monkeypatch.setattr(tables, "_TOGETHER", 8)
    kind = tables.Kind("queries", (64, 64), 1, torch.device("cpu"))
    for n in (640, 512):
        structure = CallStructure(1, n, n, causal=True)
        for window in (10, 20):
            sheet = tables.sheet_of(kind, structure, structure.segments() or ())
            assert sheet.tables(((window, 0),))
            assert len(sheet._made) == (1 if window == 10 else 2)
