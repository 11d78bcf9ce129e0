"""The kernel that lists blocks for flash-attn 4, in Triton's interpreter, against pairs of queries and keys."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from adaattn_hf.attention.heads import ALL, HeadWindows
from adaattn_hf.attention.structure import MaskStructure

from ..support.operators import NamedOperators
from .test_triton import interpreted

CPU = torch.device("cpu")
BLOCK = 128


def rows_of(structure: MaskStructure) -> Tensor:
    """First key of each query's run, the one behind its last, the query's place among keys: `[3, batch, q_len]`."""
    from adaattn_hf.backends.flash import fa4_lists

    if not structure.plain:
        return fa4_lists._runs(structure, CPU)
    place = torch.arange(structure.q_len)[None] + structure.offset()
    return torch.stack([torch.zeros_like(place), torch.full_like(place, structure.kv_len), place])


def blocks_where(pairs: Tensor, every: bool) -> Tensor:
    """Booleans `[batch, q_len, kv_len]` by blocks: one of a block holds, or every one does."""
    missing = -pairs.shape[2] % BLOCK, -pairs.shape[1] % BLOCK
    filled = pad(pairs, (0, missing[0], 0, missing[1]), value=every)
    tiles = filled.view(len(pairs), filled.shape[1] // BLOCK, BLOCK, filled.shape[2] // BLOCK, BLOCK)
    return tiles.all(4).all(2) if every else tiles.any(4).any(2)


def expected(
    rows: Tensor, kv_len: int, causal: bool, windows: HeadWindows, every: bool
) -> Tensor:  # [batch, kv_heads, blocks of queries, blocks of keys]
    """Every condition for itself: it holds for one pair of the block, or for every one."""
    first, stop, place = rows.long()[..., None]
    key = torch.arange(kv_len)
    heads = []
    for window, sinks in windows:
        inside, near = [key >= first, key < stop], [place - key < window]
        if causal:
            inside.append(key <= place)
        else:
            near.append(key - place < window)
        held = [torch.stack([blocks_where(c, every) for c in cs]).all(0) for cs in (inside, near)]
        heads.append(held[0] & (held[1] | blocks_where(key - first < sinks, every)))
    found = torch.stack(heads, 1)
    if every:
        found[..., kv_len // BLOCK :] = False  # a last, short block needs the mask
    return found


def same(lists: tuple[Tensor, ...], some: Tensor, every: Tensor, groups: int) -> None:
    flags = some & ~every, every
    for counts, indices, flagged in zip(lists[::2], lists[1::2], flags, strict=True):
        flagged = flagged.repeat_interleave(groups, 1)
        assert counts.dtype == indices.dtype == torch.int32
        assert (counts.shape, indices.shape) == (flagged.shape[:3], flagged.shape)
        assert torch.equal(counts, flagged.sum(3))
        numbers = torch.arange(flagged.shape[3])
        taken = numbers < counts[..., None]
        assert torch.equal(indices[taken].long(), numbers.expand(flagged.shape)[flagged])
        assert torch.equal(indices.sort(3).values.long(), numbers.expand(flagged.shape))


def check(structure: MaskStructure, windows: HeadWindows, groups: int, turned: bool = True) -> tuple[Any, Any]:
    """The lists of blocks of queries, and of keys where they are asked for."""
    from adaattn_hf.backends.flash import fa4_lists

    asked = structure, CPU, windows, groups, structure.kv_len, structure.plain
    rows, by_queries = rows_of(structure), fa4_lists.make_lists(*asked)[0]
    by_keys = fa4_lists.turned_lists(*asked) if turned else None
    some, every = (expected(rows, structure.kv_len, structure.causal, windows, whole) for whole in (False, True))
    same(by_queries, some, every, groups)
    if by_keys is not None:
        same(by_keys, some.mT, every.mT, groups)
    for head, (window, sinks) in enumerate(windows):
        # against the definition: all that is seen is listed, and what is listed as whole is seen
        rules = {"window": window, "sinks": sinks} if window < ALL else {}
        seen = structure.with_changes(**rules).visible()[:, 0].expand(structure.batch, -1, -1)
        assert not (blocks_where(seen, False) & ~some[:, head]).any()
        assert not (every[:, head] & ~blocks_where(seen, True)).any()
        if structure.plain:
            assert torch.equal(some[:, head], blocks_where(seen, False)[: len(some)])
    return by_queries, by_keys


def drawn(kind: str, causal: bool) -> tuple[MaskStructure, HeadWindows, int]:
    """A call of odd sizes."""
    draw = random.Random(f"{kind} {causal}")
    kv_len = draw.choice([1, 127, 128, 129, 256, draw.randint(1, 600), draw.randint(200, 900)])
    q_len = draw.randint(1, kv_len) if kind == "past" else kv_len
    batch = draw.randint(1, 3)
    rules: dict[str, Any] = {}
    if kind in ("left", "right", "cut"):
        rules = {"key_padding": torch.ones(batch, kv_len, dtype=torch.bool)}
        for row in rules["key_padding"]:
            lacking = draw.choice([0, draw.randint(0, kv_len), kv_len])
            row[slice(kv_len - lacking, None) if kind == "right" else slice(lacking)] = False
    if kind in ("packed", "cut"):
        numbers = torch.zeros(batch, kv_len, dtype=torch.long)
        for _ in range(draw.randint(0, 5)):
            numbers[:, draw.randint(0, kv_len) :] += 1
        rules |= {"q_segments": numbers, "k_segments": numbers}
    if kind == "chunks":
        rules["chunk"] = draw.randint(1, kv_len)
    structure = MaskStructure(batch, q_len, kv_len, causal, kv_len - q_len if causal else 0, **rules)
    # the definition counts sinks from the first key of a sequence, which padding and chunks may cut off
    sinks = [0, 1, 128, 130, draw.randint(0, kv_len)] if structure.sinks_at_runs else [0]
    windows = tuple(
        (draw.choice([ALL, 1, 127, 128, 129, draw.randint(1, kv_len)]), draw.choice(sinks))
        for _ in range(draw.randint(1, 3))
    )
    return structure, windows, draw.randint(1, 3)


@interpreted
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["plain", "past", "left", "right", "packed", "cut", "chunks"])
def test_random_calls(kind: str, causal: bool) -> None:
    """Plain, behind a past, padded on either side, packed, packed and padded, in chunks."""
    check(*drawn(kind, causal))


@interpreted
@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_rules_that_end_about_the_border_of_a_block(causal: bool, shift: int) -> None:
    """A window, sinks, documents and a past, each as long as blocks are, one longer and one shorter."""
    windows = ((2 * BLOCK + shift, 0), (1, BLOCK + shift), (ALL, 0))
    check(MaskStructure(1, 3 * BLOCK, 3 * BLOCK, causal), windows, 1)
    numbers = (torch.arange(5 * BLOCK)[None] >= 2 * BLOCK + shift).long()
    check(MaskStructure(1, 5 * BLOCK, 5 * BLOCK, causal, q_segments=numbers, k_segments=numbers), windows, 1)
    if causal:
        past = BLOCK + shift
        check(MaskStructure(1, BLOCK, BLOCK + past, causal, q_offset=past), windows, 1)


@interpreted
@pytest.mark.parametrize("causal", [True, False])
def test_every_query_sees_nothing(causal: bool) -> None:
    padding = torch.zeros(2, 200, dtype=torch.bool)
    padding[1, 150:] = True
    structure = MaskStructure(2, 200, 200, causal, key_padding=padding)
    by_queries, by_keys = check(structure, ((ALL, 0), (9, 3)), 2)
    for counts in (*by_queries[::2], *by_keys[::2]):
        assert not counts[0].any()
    assert by_queries[0][1].any()


@interpreted
def test_a_call_worked_out_by_hand() -> None:
    """Rows 0-127, 128-255 and 256-299 under a window of 200 keys with 5 sinks, and under none."""
    by_queries, by_keys = check(MaskStructure(1, 300, 300, causal=True), ((200, 5), (ALL, 0)), 1)
    masked_n, masked, whole_n, whole = by_queries
    assert masked_n[0].tolist() == [[1, 2, 2], [1, 1, 1]]
    assert whole_n[0].tolist() == [[0, 0, 1], [0, 1, 2]]
    assert masked[0, 0].tolist() == [[0, 2, 1], [0, 1, 2], [0, 2, 1]]
    assert whole[0, :, 2].tolist() == [[1, 2, 0], [0, 1, 2]]
    masked_n, masked, whole_n, whole = by_keys
    assert masked_n[0].tolist() == [[3, 1, 1], [1, 1, 1]]
    assert whole_n[0].tolist() == [[0, 1, 0], [2, 1, 0]]
    assert masked[0, 0, 0].tolist() == [0, 1, 2]
    assert whole[0, 1, 0].tolist() == [1, 2, 0]


@interpreted
def test_a_row_of_128k_keys() -> None:
    """More blocks than a program looks at together: it goes on where the last ones left off."""
    kv_len = (1 << 17) - 5
    structure = MaskStructure(1, 130, kv_len, causal=True, q_offset=kv_len - 130)
    by_queries, _ = check(structure, ((ALL, 0), (100_000, 130), (700, 0)), 1, turned=False)
    assert by_queries[3].shape == (1, 3, 2, 1024)
    assert by_queries[2][0, 0].tolist() == [1022, 1023]


@interpreted
def test_a_block_of_keys_that_many_blocks_of_queries_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a program looks at together, of which there are fewer here: each block is a program of its own."""
    from adaattn_hf.backends.flash import fa4_lists

    monkeypatch.setattr(fa4_lists, "_CHUNK", 8)
    _, by_keys = check(MaskStructure(1, 2500, 200), ((ALL, 0), (1200, 4)), 1)
    assert by_keys[0][0].tolist() == [[0, 20], [11, 11]]
    assert by_keys[2][0].tolist() == [[20, 0], [9, 0]]


@pytest.mark.parametrize("causal", [True, False])
def test_the_host_does_little_for_a_new_shape(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """One launch, and a few operations of torch; on a device one more, which moves the table there."""
    pytest.importorskip("triton")
    from adaattn_hf.backends.flash import fa4_lists

    grids: list[Any] = []

    class Launches:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kw: grids.append(grid)

    monkeypatch.setattr(fa4_lists, "listing", Launches())
    structure = MaskStructure(3, 300, 300, causal)
    with NamedOperators() as noted:
        _, tables, _ = fa4_lists.make_lists(structure, CPU, ((ALL, 0), (70, 16)), 2, 300, True)
    assert grids == [(3, 2, 1)]
    assert len(noted.names) + 1 <= 8, noted.names
    assert all(t.shape[-1] <= 4 for t in tables)  # nothing as long as the queries
