"""What blocks of queries and of keys read, beside masks that say it key by key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from adaattn_hf.attention.structure import CallStructure, Segment
from adaattn_hf.backends.triton import tables
from adaattn_hf.backends.triton.reads import Blocks
from adaattn_hf.backends.windows import ALL

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
    structure = CallStructure(1, 1003, 1003, causal=True)
    segments = structure.segments() or ()
    narrow, wide = (100, 4), (300, 4)
    kind = tables.Kind("queries", (64, 64), 2, torch.device("cpu"))
    for windows in ((narrow, wide), (wide, narrow), (wide, (ALL, 0)), None):
        sheet = tables.sheet_of(kind, structure, segments)
        assert len(sheet.tables(windows).entries) == sheet.count == 32
    assert made == [narrow, wide, (ALL, 0)]


@pytest.mark.parametrize("windows", [None, ((100, 4), (ALL, 0))])
@pytest.mark.parametrize("dealt", [(), (1, 2, 12)])
def test_no_runs_have_tables_of_no_entries(windows: Any, dealt: tuple[int, ...]) -> None:
    kind = tables.Kind("queries", (64, 64), 2, torch.device("cpu"), *dealt)
    found = tables.sheet_of(kind, CallStructure(1, 100, 100, causal=True), ()).tables(windows)
    assert [list(found.segments.shape), list(found.entries.shape)] == [[0, 6], [0, 3]]
