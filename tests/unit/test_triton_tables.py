"""Work tables that are made on the device, beside masks that say key by key what is seen."""

from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from adaattn_hf.attention.heads import ALL, HeadWindows
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import base
from adaattn_hf.backends.triton import tables
from adaattn_hf.backends.triton.launch import Launcher
from adaattn_hf.backends.triton.tables import Blocking
from adaattn_hf.backends.triton.tiling import Warps

from ..support.operators import NamedOperators
from .test_triton import STRUCTURES, interpreted

CPU = torch.device("cpu")
RUNS = [name for name, s in STRUCTURES.items() if s.segments() is not None]
WINDOWS = st.tuples(st.integers(1, 50), st.integers(0, 9)) | st.just((ALL, 0))


@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 20), WINDOWS)
def test_pairs_are_counted_as_they_are_seen(n: int, past: int, behind: int, rule: tuple[int, int]) -> None:
    window, sinks = rule
    structure = MaskStructure(2, n, past + n + behind, causal=True, q_offset=past, window=window, sinks=sinks)
    seen = structure.with_changes(sinks=min(sinks, past + n)).visible()
    assert tables.pairs_seen(structure, (rule, (ALL, 0))) == 2 * (
        int(seen.sum()) + int(structure.with_changes(window=None).visible().sum())
    )


@interpreted
@pytest.mark.parametrize("name", RUNS)
def test_runs_hold_every_query_once(name: str) -> None:
    structure = STRUCTURES[name]
    runs = tables.find_runs(structure, CPU, 0, False)
    assert runs.dtype == torch.int32
    assert runs.tolist() == [list(run) for run in structure.cached(tables.runs_of)]
    rows = sorted((run[0], run[1] + i) for run in runs.tolist() for i in range(run[2]))
    assert rows == [(row, i) for row in range(structure.batch) for i in range(structure.q_len)]


@interpreted
@pytest.mark.parametrize(("block", "line"), [(16, 256), (1, 2)], ids=["few", "many"])
@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize("name", RUNS)
def test_every_block_is_an_entry_once_those_with_most_to_do_first(
    name: str, of: Literal["queries", "keys"], block: int, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a class they are ordered by head, and those of queries from the last one on."""
    monkeypatch.setattr(tables, "_LINE", line)
    structure = STRUCTURES[name]
    table, entries = tables.find_entries(structure, CPU, Blocking(of, block), 2)
    runs = structure.cached(tables.runs_of)
    assert table.tolist() == [list(run) for run in runs]
    blocks = [
        (number, first)
        for number, run in enumerate(runs)
        for first in range(0, run.q_len if of == "queries" else run.k_len, block)
    ]

    def work(number: int, first: int) -> int:
        run = runs[number]
        if of == "queries":
            return max(0, min(run.k_len, first + run.offset + block) if structure.causal else run.k_len)
        return max(0, run.q_len - max(first - run.offset, 0)) if structure.causal else run.q_len

    most = max((work(*one) for one in blocks), default=0)
    told = [(*one, head) for head in range(2) for one in (blocks[::-1] if of == "queries" else blocks)]
    told.sort(key=lambda entry: -(work(*entry[:2]) * 16 // (most + 1)))
    assert entries.dtype == torch.int32
    assert entries.tolist() == [list(entry) for entry in told]


def test_no_runs_have_no_entries() -> None:
    structure = MaskStructure(1, 4, 4, causal=True, key_padding=torch.zeros(1, 4, dtype=torch.bool))
    assert tables.find_entries(structure, CPU, Blocking("keys", 16), 2)[1].shape == (0, 3)


@pytest.mark.parametrize(("name", "launches"), [("left padding", 2), ("documents", 2), ("causal", 3)])
def test_entries_take_few_launches(name: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model meets a new structure with every padded batch: small calls would wait for the host."""
    log: list[object] = []
    monkeypatch.setattr(Launcher, "__call__", lambda *launched: log.append(launched))
    structure = STRUCTURES[name].with_changes()
    assert structure.segments() is not None
    with NamedOperators() as noted:
        tables.find_entries(structure, CPU, Blocking("queries", 16), 2)
    made = {"aten::new_empty", "aten::view", "aten::lift_fresh", "aten::empty"}  # which compute nothing
    assert (len(log), set(noted.names) - made) == (launches, set())


@interpreted
def test_a_graph_that_is_captured_owns_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing computes them before it is replayed, and it may be replayed when the structure is gone."""
    structure = MaskStructure(1, 100, 100, causal=True)
    asked = structure, CPU, tables.find_entries, Blocking("queries", 16), 2
    before = base.derived_on(*asked)
    monkeypatch.setattr(base, "capturing", lambda device: True)
    assert base.derived_on(*asked) is not before
    monkeypatch.undo()
    assert base.derived_on(*asked) is before


def test_another_stream_makes_its_own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not wait for the one that computes them."""
    structure, there, current = MaskStructure(1, 100, 100, causal=True), torch.device("cuda", 0), [1]
    monkeypatch.setattr(base, "capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(stream_id=current[0]))

    def make(*asked: object) -> list[object]:
        return list(asked)

    first = base.derived_on(structure, there, make, 2)
    assert first == [structure, there, 2]
    assert base.derived_on(structure, there, make, 2) is first
    current[0] = 2
    assert base.derived_on(structure, there, make, 2) is not first


def dealt(structure: MaskStructure, warps: Warps, windows: HeadWindows, most: int) -> list[list[list[int]]]:
    _, items, programs = tables.find_items(structure, CPU, warps, windows, most)
    turns = items.view(-1, programs, 3)
    found = []
    for program in range(programs):
        count = int(turns[0, program, 0])
        assert turns[count + 1, program, 2] == -1
        found.append(turns[1 : count + 1, program].tolist())
    return found


def cost(n: int, item: list[int], warps: Warps, windows: HeadWindows) -> int:
    """Tiles of an item of a causal call, beginning and edges counted."""
    window, sinks = windows[item[2] // warps.sharing]
    start = max(item[1] - window + 1, 0) // warps.part * warps.part
    keys = min(item[1] + 64, n) - start + min(sinks, start)
    return -(-keys // (warps.part * warps.pieces)) + 1 + (item[1] >= window)


@interpreted
@settings(max_examples=15)
@given(
    st.integers(1, 3000), st.integers(1, 3), st.sampled_from([1, 5, 24, 132]),
    st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 99)) | st.just((ALL, 0)), min_size=1, max_size=4),
)  # fmt: skip
def test_every_item_is_dealt_out_once_and_programs_end_together(
    n: int, parts: int, programs: int, windows: list[tuple[int, int]]
) -> None:
    """No program has more than an average one and its longest item; the longest come first."""
    warps, rules = Warps(1, 1, 128, 2, False, False, 64, parts, True), tuple(windows)
    structure = MaskStructure(1, n, n, causal=True)
    found = dealt(structure, warps, rules, programs)
    items = [item for program in found for item in program]
    heads = len(rules) * parts
    assert sorted(items) == [[0, first, head] for first in range(0, n, 64) for head in range(heads)]
    costs = [[cost(n, item, warps, rules) for item in program] for program in found]
    assert all(one == sorted(one, reverse=True) for one in costs)
    loads = [sum(one) for one in costs]
    assert max(loads) <= sum(loads) / len(loads) + max(map(max, costs))


@interpreted
def test_uneven_heads_are_dealt_out_evenly() -> None:
    """Three heads of 8,192 queries, of which two have windows: rows turned round alone leave columns a third more."""
    rules, warps = ((ALL, 0), (4096, 0), (2048, 0)), Warps(1, 1, 64, 2, False, False, 64, 1, False)
    found = dealt(MaskStructure(1, 8192, 8192, causal=True), warps, rules, 132)
    loads = [sum(cost(8192, item, warps, rules) for item in program) for program in found]
    assert max(loads) * 132 <= 1.06 * sum(loads)
