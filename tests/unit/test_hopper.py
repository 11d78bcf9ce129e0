"""Which calls the kernels for Hopper get, and what they are launched with; the kernels themselves need the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

triton = pytest.importorskip("triton", minversion="3.6", reason="Gluon and knobs came with Triton 3.6")

from adaattn_hf.attention.heads import HeadRules  # noqa: E402  (the modules below import triton)
from adaattn_hf.attention.request import AttentionRequest, CallSpec  # noqa: E402
from adaattn_hf.attention.structure import CallStructure  # noqa: E402
from adaattn_hf.backends import capability, order, select  # noqa: E402
from adaattn_hf.backends.triton import dealing, hopper, launch, shapes, tables  # noqa: E402
from adaattn_hf.backends.windows import ALL  # noqa: E402

from ..support.on_device import shifted  # noqa: E402

PROGRAMS = 4
N = 512
Launched = list[tuple[str, tuple[int, ...], dict[str, Any], tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, bulk_always: None) -> Launched:
    """What is launched on a device for which the kernels were made: name, grid, constants, arguments."""
    found: Launched = []

    def named(name: str) -> Any:
        def run(grid: tuple[int, ...], arguments: Any, constants: Any, kind: Any) -> None:
            found.append((name, grid, dict(constants), tuple(arguments)))

        return run

    monkeypatch.setattr(hopper, "usable", lambda device: True)
    monkeypatch.setattr(hopper, "_LEAST_OF_ROWS", 0)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: PROGRAMS)
    monkeypatch.setattr(hopper, "launch_specialised", lambda: named("specialised"))
    monkeypatch.setattr(shapes, "launch_forward", named("forward"))
    return found


def drawn(structure: CallStructure, dim: int = 128, heads: int = 4, **extra: Any) -> AttentionRequest:
    def draw(length: int, count: int) -> Tensor:
        return torch.zeros(structure.batch, length, count, dim, dtype=torch.bfloat16).transpose(1, 2)

    lengths = structure.q_len, structure.kv_len
    return AttentionRequest(
        draw(lengths[0], heads), draw(lengths[1], 2), draw(lengths[1], 2), structure, dim**-0.5, **extra
    )


def causal(n: int = N) -> CallStructure:
    return CallStructure(1, n, n, causal=True)


WINDOWS = HeadRules((100, 0), (4, 0), ("model",) * 2)


@pytest.mark.parametrize(
    ("heads", "dim", "rules", "together"),
    [
        (4, 128, None, 1),
        (4, 128, WINDOWS, 1),
        (4, 64, None, 1),
        (6, 64, None, 3),
    ],
)
def test_heavy_calls_are_dealt_out(
    launched: Launched, heads: int, dim: int, rules: HeadRules | None, together: int
) -> None:
    """There are as many programs as multiprocessors; entries of all heads are told as items."""
    launch.attend(drawn(causal(), dim, heads, per_head=rules))
    ((name, programs, constants, arguments),) = launched
    assert (name, programs, constants["TOGETHER"]) == ("specialised", (PROGRAMS,), together)
    rows = 64 * constants["GROUPS_OF_WARPS"] // together
    items = arguments[9].tolist()
    assert arguments[-1] == len(items)
    told = sorted(item for item in items if item[2] >= 0)
    assert told == [[0, row, part] for row in range(0, N, rows) for part in range(heads // together)]
    # with windows the copy engine brings halves of tiles
    expected = [constants["BLOCK_N"], dim] if rules is None else [constants["BLOCK_N"] // 2, 64]
    assert arguments[3].block_shape == [1, 1, *expected]


def drawn_shapes(least: int = 1, most: int = 400) -> Any:
    return st.tuples(
        st.integers(least, most), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1)
    )


def _dealt(
    entries: NDArray[np.int32], costs: NDArray[np.int64], parts: int, programs: int
) -> NDArray[np.int32]:
    """Items of one table, by the numbers that they are dealt out by."""
    items = entries.repeat(parts, axis=0)
    items[:, 2] = items[:, 2] * parts + np.tile(np.arange(parts), len(entries))
    if dealing.uneven(len(items), programs):
        (slots,) = dealing.balanced(costs.repeat(parts)[None], programs)
    else:
        slots = dealing.turned(len(items), programs)
    none = np.array([[0, 0, -1]], dtype=np.int32)
    found: NDArray[np.int32] = np.concatenate([items, none]).take(slots, axis=0)
    return found


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300))
def test_equal_keys_are_ordered_by_their_places(keys: list[int]) -> None:
    found = dealing.ordered(np.array([keys, keys[::-1]]))
    assert found.tolist() == [np.argsort(one, kind="stable").tolist() for one in (keys, keys[::-1])]


@given(drawn_shapes(), st.integers(1, 4))
def test_tables_that_are_dealt_out_together_are_those_dealt_out_alone(
    shape: tuple[int, int, int, int], tables: int
) -> None:
    """But for columns that have nothing more to do."""
    count, _, programs, seed = shape
    costs = np.random.default_rng(seed).integers(1, 1000, (tables, count))
    for slots, cost in zip(dealing.balanced(costs, programs), costs, strict=True):
        (alone,) = dealing.balanced(cost[None], programs)
        assert slots[: len(alone)].tolist() == alone.tolist()
        assert (slots[len(alone) :] == count).all()


@given(drawn_shapes())
def test_every_item_is_in_a_column_once(shape: tuple[int, int, int, int]) -> None:
    count, parts, programs, seed = shape
    costs = np.sort(np.random.default_rng(seed).integers(1, 1000, count))[::-1]
    entries = np.stack([np.arange(count), 64 * np.arange(count), np.arange(count) % 3], axis=1).astype(
        np.int32
    )
    items = _dealt(entries, costs, parts, programs)
    assert items.dtype == np.int32
    expected = {(i, 64 * i, i % 3 * parts + part) for i in range(count) for part in range(parts)}
    found = [tuple(item) for item in items.tolist() if item[2] >= 0]
    assert len(found) == len(expected)
    assert set(found) == expected
    if len(found) > programs:
        assert len(items) % programs == 0


@given(drawn_shapes(least=100))
def test_columns_come_to_about_the_same(shape: tuple[int, int, int, int]) -> None:
    """No column has more than an average one and its longest item; few long items leave short ones to others."""
    count, parts, _, seed = shape
    random = np.random.default_rng(seed)
    costs = np.sort(random.choice([8, 60, 64], count) * random.integers(1, 9, count))[::-1]
    entries = np.stack([np.arange(count)] * 3, axis=1).astype(np.int32)
    programs = 24
    items = _dealt(entries, costs, parts, programs)
    of = np.where(items[:, 2] < 0, 0, costs[items[:, 0]]).reshape(-1, programs).sum(0)
    assert of.max() <= costs.sum() * parts / programs + costs.max()


def _fullest(costs: NDArray[np.int64]) -> float:
    """What the fullest of 132 columns has, in means of all."""
    entries = np.stack([np.arange(len(costs))] * 3, axis=1).astype(np.int32)
    items = _dealt(entries, costs, 1, 132)
    of = np.where(items[:, 2] < 0, 0, costs[items[:, 0]]).reshape(-1, 132).sum(0)
    return float(of.max() * 132 / costs.sum())


def test_uneven_heads_are_dealt_out_evenly() -> None:
    """Three heads of 8,192 queries, of which two have windows: rows turned round alone leave columns a third more."""
    blocks = np.arange(1, 129)
    costs = np.sort(np.concatenate([blocks, np.minimum(blocks, 65), np.minimum(blocks, 33)]))[::-1]
    assert _fullest(costs) <= 1.04


def test_items_whose_window_leaves_keys_out_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sinks and the edge of their window come on top of the keys that they read."""
    seen: list[NDArray[np.int64]] = []

    def noted(costs: NDArray[np.int64], programs: int) -> NDArray[np.int64]:
        seen.append(costs[0])
        return np.arange(costs.shape[1])[None]

    monkeypatch.setattr(tables, "balanced", noted)
    structure = causal(1000)
    segments = structure.segments() or ()
    found: list[dict[tuple[int, ...], int]] = []
    for windows, pieces in ((None, 1), (((ALL, 0), (256, 16)), 2)):
        kind = tables.Kind("queries", (64, 128 // pieces), 2, torch.device("cpu"), 1, pieces, 8)
        items = tables.sheet_of(kind, structure, segments).tables(windows).entries
        assert items.dtype == torch.int32
        found.append(dict(zip(map(tuple, items.tolist()), seen.pop().tolist(), strict=True)))
    plain, windowed = found
    for (segment, first, head), cost in windowed.items():
        left_out = head == 1 and first >= 256
        start = (first - 255) // 64 * 64
        keys = min(first + 64, 1000) - start + min(16, start)
        expected = -(-keys // 128) + 1 + 1 if left_out else plain[segment, first, head]
        assert cost == expected


def test_a_call_for_hopper_makes_no_tables_of_the_other_kernel(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables take longer than a launch: a prompt of a new length under a plan has some for each layer."""
    made: list[int] = []
    placed = tables._placed

    def noted(segments: Any, entries: Any, *rest: Any) -> Any:
        made.append(entries.shape[1])
        return placed(segments, entries, *rest)

    monkeypatch.setattr(tables, "_placed", noted)
    request = drawn(causal(), 64, 6)
    launch.attend(request)
    launch.attend(request)
    assert [name for name, *_ in launched] == ["specialised"] * 2
    assert made == [len(launched[0][3][9])]
    launch.attend(replace(request, key=shifted(request.key)))
    assert len(made) == 2


@pytest.mark.parametrize(
    ("windows", "many", "kernel"),
    [((100, 0), 16, "forward"), ((0, 200), 16, "specialised"), ((100, 0), 0.01, "specialised")],
)
def test_windows_of_64_channels_must_leave_enough_keys(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, windows: tuple[int, int], many: float, kernel: str
) -> None:
    """A quarter of them is enough where each program computes many items."""
    monkeypatch.setattr(hopper, "_MANY_TURNS", many)
    monkeypatch.setattr(hopper, "_LEAST_OF_WINDOWS", 250)  # without windows blocks read 288 on average
    rules = HeadRules(windows, (0, 0), ("model",) * 2)
    launch.attend(drawn(causal(), 64, per_head=rules))
    assert [name for name, *_ in launched] == [kernel]


def documents(*lengths: int) -> CallStructure:
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    n = sum(lengths)
    return CallStructure(1, n, n, causal=True, q_segments=numbers, k_segments=numbers)


@pytest.mark.parametrize(
    ("lengths", "close"), [((256, 128, 384), False), ((200, 312), True), ((256, 60), False)]
)
def test_tiles_move_back_where_documents_end_within_them(
    launched: Launched, lengths: tuple[int, ...], close: bool
) -> None:
    """But not at the end of the tensor, behind which the copy engine brings zeros."""
    launch.attend(drawn(documents(*lengths)))
    ((name, _, constants, _),) = launched
    assert (name, constants["CLOSE"]) == ("specialised", close)


def test_documents_shorter_than_a_tile_go_to_the_other_kernel(launched: Launched) -> None:
    """Moved back, their tile would begin within the document before; the last one ends with the tensor."""
    lengths = (300, 20, 127, 129, 50)
    launch.attend(drawn(documents(*lengths)))
    computed = [{arguments[8][entry[0], 2].item() for entry in arguments[9]} for *_, arguments in launched]
    assert [name for name, *_ in launched] == ["specialised", "forward"]
    assert computed == [{300, 129, 50}, {20, 127}]


def test_a_call_of_short_runs_alone_is_one_launch(launched: Launched) -> None:
    """The first tokens in a static cache have fewer keys than a tile, behind which there is room for more."""
    launch.attend(drawn(CallStructure(1, 40, N, causal=True, q_offset=60)))
    assert [name for name, *_ in launched] == ["forward"]


def test_a_call_of_short_documents_is_one_launch(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_LEAST_PRODUCTS", 1 << 20)  # the last document alone is less
    launch.attend(drawn(documents(*[100] * 20, 10)))
    assert [name for name, *_ in launched] == ["forward"]


def test_others_go_to_the_kernel_of_one_task(launched: Launched) -> None:
    whole = drawn(causal())
    odd = replace(whole, key=shifted(whole.key))
    spread = replace(whole, query=torch.zeros(1, 4, N, 256, dtype=torch.bfloat16)[..., ::2])
    others = [
        drawn(causal(), softcap=10.0),
        drawn(causal(), 96),
        drawn(causal(), 64, per_head=WINDOWS),
        odd,
        spread,
    ]
    for request in others:
        launch.attend(request)
    assert [name for name, *_ in launched] == ["forward"] * len(others)


@pytest.mark.parametrize(("least", "kernel"), [(320, "specialised"), (321, "forward")])
def test_rows_of_one_narrow_head_must_read_enough_keys(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, least: int, kernel: str
) -> None:
    monkeypatch.setattr(hopper, "_LEAST_OF_ROWS", least)  # blocks of 128 queries read 320 on average
    launch.attend(drawn(causal(), 64))
    assert [name for name, *_ in launched] == [kernel]


def test_light_calls_go_without(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_LEAST_PRODUCTS", 1 << 40)
    launch.attend(drawn(causal()))
    assert [name for name, *_ in launched] == ["forward"]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything says that the current device is a Hopper one."""
    hopper._fits.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(capability, "_of_device", lambda index: capability.of_sm((9, 0)))
    monkeypatch.setattr(hopper, "_installed", lambda: True)
    yield
    hopper._fits.cache_clear()


def heavy(**changes: Any) -> CallSpec:
    spec = CallSpec.of(drawn(causal()))
    return spec._replace(device="cuda", pairs=1 << 31, keys=4096, **changes)


@pytest.mark.usefixtures("on_hopper")
def test_causal_calls_on_hopper_prefer_our_kernels_to_torchs() -> None:
    ours = ("fa3_fwd", "fa4", "fa3", "triton", "sdpa", "eager")
    assert select.order(heavy()) == select.order(heavy(head_dim=64, head_dim_v=64)) == ours
    for other in (
        {"needs_grad": True},
        {"head_dim": 96, "head_dim_v": 96},
        {"head_dim": 64},
        {"kind": "full"},
    ):
        assert select.order(heavy(**other)) == ("fa3_fwd", "fa4", "fa3", "sdpa", "eager")
    assert select.order(heavy()._replace(keys=1024)) == ("fa3_fwd", "fa4", "fa3", "sdpa", "eager")
    assert select.order(heavy()._replace(pairs=1 << 29)) == ("triton", "sdpa", "eager")
    for light in ({"pairs": 1 << 24}, {"pairs": 1 << 29, "keys": 1024}, {"pairs": 1 << 29, "kind": "full"}):
        assert select.order(heavy()._replace(**light)) == ("sdpa", "eager")


class There(Tensor):
    """A tensor that says that it lies on the first CUDA device."""

    is_cpu = False
    device = torch.device("cuda", 0)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("n", "heads", "dim", "first"),
    [
        (100, 32, 128, "triton"),
        (512, 32, 128, "triton"),
        (300, 128, 128, "sdpa"),
        (700, 64, 128, "sdpa"),
        (1024, 32, 128, "triton"),
        (1500, 32, 128, "triton"),
        (1024, 128, 128, "sdpa"),
        (2047, 64, 128, "sdpa"),
        (2048, 32, 128, "triton"),
        (2048, 4, 128, "sdpa"),
        (4096, 128, 128, "fa3_fwd"),
        (1024, 1024, 128, "fa3_fwd"),
        (1024, 8, 64, "triton"),
        (1500, 12, 64, "sdpa"),
        (2048, 12, 64, "sdpa"),
        (3000, 9, 64, "sdpa"),
        (3000, 15, 64, "triton"),
        (4096, 9, 64, "triton"),
        (8192, 9, 64, "triton"),
    ],
)
def test_causal_requests_on_hopper(n: int, heads: int, dim: int, first: str) -> None:
    """As `order` is told of a request: sizes are rounded there. Calls that wait for the host, and longer ones."""
    parts = [
        torch.empty(1, 1, count, 1, dtype=torch.bfloat16).expand(1, n, count, dim).transpose(1, 2)
        for count in (heads, 1, 1)
    ]
    query, key, value = (part.as_subclass(There) for part in parts)
    spec = CallSpec.of(AttentionRequest(query, key, value, causal(n), 1.0))
    assert select.order(spec)[0] == first


@pytest.mark.usefixtures("on_hopper")
def test_windows_per_head_on_hopper_prefer_our_kernels_to_flash_attn() -> None:
    assert select.order(heavy(head_windows=True)) == ("triton", "fa4")
    assert select.order(heavy(head_windows=True, needs_grad=True)) == ("fa4", "triton")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("lacks", ["another device", "an older Triton", "Triton"])
def test_elsewhere_the_order_stays(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "another device":
        monkeypatch.setattr(capability, "_of_device", lambda index: capability.of_sm((10, 0)))
    elif lacks == "an older Triton":
        monkeypatch.setattr(hopper, "_installed", lambda: False)
    else:
        monkeypatch.setattr(order.TRITON, "missing", lambda: ("triton is not installed",))
    assert "triton" not in select.order(heavy())
    assert select.order(heavy(head_windows=True)) == ("fa4", "triton")


@pytest.mark.parametrize(("version", "is_there"), [("3.5.1", False), ("3.6.0", True), ("3.10.0", True)])
def test_the_version_of_triton(monkeypatch: pytest.MonkeyPatch, version: str, is_there: bool) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert hopper._installed.__wrapped__() is is_there
