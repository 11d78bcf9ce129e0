"""Which calls the kernels for Hopper get, and what they are launched with; the kernels themselves need the device."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", minversion="3.6", reason="Gluon and knobs came with Triton 3.6")

from adaattn_hf.attention.call import AttentionCall  # noqa: E402
from adaattn_hf.attention.heads import HeadRules  # noqa: E402
from adaattn_hf.attention.kind import GRAD  # noqa: E402
from adaattn_hf.attention.structure import MaskStructure  # noqa: E402
from adaattn_hf.backends import order, select  # noqa: E402
from adaattn_hf.backends.triton import forward, launch, specialised, tiling  # noqa: E402

from ..support.calls import attended, call_over  # noqa: E402
from ..support.on_device import shifted, told_of  # noqa: E402

PROGRAMS = 4
N = 512
Launched = list[tuple[str, tuple[int, ...], dict[str, Any], tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, bulk_always: None) -> Launched:
    """What is launched on a device for which the kernel was made: name, grid, constants, arguments."""
    found: Launched = []

    def named(name: str) -> Any:
        def run(grid: tuple[int, ...], arguments: Any, constants: Any, kind: Any = None) -> None:
            found.append((name, grid, dict(constants), tuple(arguments)))

        return run

    facts = launch.device_facts(torch.device("cpu"))._replace(specialised=True, processors=PROGRAMS)
    monkeypatch.setattr(forward, "device_facts", lambda device: facts)
    monkeypatch.setattr(tiling, "_LEAST_OF_ROWS", 0)
    monkeypatch.setattr(specialised, "specialised", named("specialised"))
    monkeypatch.setattr(forward, "forward", named("forward"))
    return found


def attend(asked: AttentionCall) -> None:
    attended("triton", asked)


def drawn(structure: MaskStructure, dim: int = 128, heads: int = 4, **extra: Any) -> AttentionCall:
    return call_over(structure, dim, heads, torch.bfloat16, dim**-0.5, **extra)


def items_of(table: Tensor) -> list[list[int]]:
    turns = table.view(-1, PROGRAMS, 3)
    return [
        turns[1 + turn, program].tolist() for program in range(PROGRAMS) for turn in range(int(turns[0, program, 0]))
    ]


def causal(n: int = N) -> MaskStructure:
    return MaskStructure(1, n, n, causal=True)


WINDOWS = HeadRules((100, 0), (4, 0), ("model",) * 2)


@pytest.mark.parametrize(
    ("heads", "dim", "rules", "together"), [(4, 128, None, 1), (4, 128, WINDOWS, 1), (4, 64, None, 1), (6, 64, None, 3)]
)
def test_heavy_calls_are_dealt_out(
    launched: Launched, heads: int, dim: int, rules: HeadRules | None, together: int
) -> None:
    """There are as many programs as multiprocessors; entries of all heads are told as items."""
    attend(drawn(causal(), dim, heads, per_head=rules))
    ((name, programs, constants, arguments),) = launched
    assert (name, programs, constants["TOGETHER"]) == ("specialised", (PROGRAMS,), together)
    told, rows = sorted(items_of(arguments[9])), range(0, N, 64 * constants["GROUPS_OF_WARPS"] // together)
    assert told == [[0, row, part] for row in rows for part in range(heads // together)]
    # with windows TMA brings halves of tiles
    keys = constants["BLOCK_N"]
    expected = [keys, dim] if rules is None else [keys // 2, 64]
    assert arguments[3].block_shape == [1, 1, *expected]


@pytest.mark.parametrize(("windows", "limits", "kernel"), [
    ((100, 0), {"_LEAST_OF_WINDOWS": 200, "_MANY_TURNS": 16}, "forward"),
    ((0, 200), {"_LEAST_OF_WINDOWS": 200, "_MANY_TURNS": 16}, "specialised"),
    ((100, 0), {"_LEAST_OF_WINDOWS": 200, "_MANY_TURNS": 0.01}, "specialised"),
    (None, {"_LEAST_OF_ROWS": 256}, "specialised"), (None, {"_LEAST_OF_ROWS": 257}, "forward"),
])  # fmt: skip
def test_heads_of_64_channels_must_read_enough_keys(
    launched: Launched, monkeypatch: pytest.MonkeyPatch,
    windows: tuple[int, int] | None, limits: dict[str, float], kernel: str,
) -> None:  # fmt: skip
    """Without windows queries see 256.5 on average; a quarter is enough where each program computes many items."""
    for name, value in limits.items():
        monkeypatch.setattr(tiling, name, value)
    rules = None if windows is None else HeadRules(windows, (0, 0), ("model",) * 2)
    attend(drawn(causal(), 64, per_head=rules))
    assert [name for name, *_ in launched] == [kernel]


def documents(*lengths: int) -> MaskStructure:
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    n = sum(lengths)
    return MaskStructure(1, n, n, causal=True, q_segments=numbers, k_segments=numbers)


@pytest.mark.parametrize(("lengths", "close"), [((256, 128, 384), False), ((200, 312), True), ((256, 60), False)])
def test_tiles_move_back_where_documents_end_within_them(
    launched: Launched, lengths: tuple[int, ...], close: bool
) -> None:
    """But not at the end of the tensor, behind which TMA brings zeros."""
    attend(drawn(documents(*lengths)))
    ((name, _, constants, _),) = launched
    assert (name, constants["CLOSE"]) == ("specialised", close)


def test_documents_shorter_than_a_tile_go_to_the_other_kernel(launched: Launched) -> None:
    """Moved back, their tile would begin within the document before; the last one ends with the tensor."""
    lengths = (300, 20, 127, 129, 50)
    attend(drawn(documents(*lengths)))
    told = [items_of(launched[0][3][9]), launched[1][3][9].tolist()]
    computed = [
        {arguments[8][entry[0], 2].item() for entry in entries}
        for entries, (*_, arguments) in zip(told, launched, strict=True)
    ]
    assert [name for name, *_ in launched] == ["specialised", "forward"]
    assert computed == [{300, 129, 50}, {20, 127}]


@pytest.mark.parametrize(
    ("structure", "least"),
    [
        # the first tokens in a static cache have fewer keys than a tile, after which there is room for more
        (MaskStructure(1, 40, N, causal=True, q_offset=60), 0),
        (documents(*[100] * 20, 10), 1 << 20),  # only the last document would be for Hopper, and it is light
        (causal(), 1 << 40),
    ],
    ids=["short runs", "short documents", "light"],
)
def test_short_runs_and_light_calls_are_one_launch_of_the_other_kernel(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, structure: MaskStructure, least: int
) -> None:
    monkeypatch.setattr(forward, "_LEAST_PRODUCTS", least)
    attend(drawn(structure))
    assert [name for name, *_ in launched] == ["forward"]


def test_others_go_to_the_kernel_of_one_task(launched: Launched) -> None:
    whole = drawn(causal())
    odd = replace(whole, key=shifted(whole.key))
    spread = replace(whole, query=torch.zeros(1, 4, N, 256, dtype=torch.bfloat16)[..., ::2])
    others = [drawn(causal(), softcap=10.0), drawn(causal(), 96), drawn(causal(), 64, per_head=WINDOWS), odd, spread]
    for call in others:
        attend(call)
    assert [name for name, *_ in launched] == ["forward"] * len(others)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=PROGRAMS))
    told_of(monkeypatch, (9, 0))
    launch.device_facts.cache_clear()
    yield
    launch.device_facts.cache_clear()


def order_of(*features: int, **changes: Any) -> tuple[str, ...]:
    """Of a heavy causal call on a CUDA device, as it is changed."""
    kind = drawn(causal()).checked_kind()._replace(device=torch.device("cuda"), pairs=1 << 31, keys=4096)
    return select.order(kind._replace(features=kind.features | sum(features), **changes))


@pytest.mark.usefixtures("on_hopper")
def test_causal_calls_on_hopper_prefer_our_kernels_to_torchs() -> None:
    flash = ("fa3_fwd", "fa4")
    for ours in ({}, {"head_dim": 64, "head_dim_v": 64}):
        assert order_of(**ours) == (*flash, "triton", "sdpa", "eager")
    others: list[dict[str, Any]] = [
        {"head_dim": 96, "head_dim_v": 96}, {"head_dim": 64}, {"shape": "full"}, {"keys": 1024},
    ]  # fmt: skip
    for other in others:
        assert order_of(**other) == (*flash, "sdpa", "eager")
    assert order_of(GRAD) == (*flash, "sdpa", "eager")
    assert order_of(pairs=1 << 29) == ("triton", "sdpa", "eager")
    lights: list[dict[str, Any]] = [
        {"pairs": 1 << 24}, {"pairs": 1 << 29, "keys": 1024}, {"pairs": 1 << 29, "shape": "full"}
    ]  # fmt: skip
    for light in lights:
        assert order_of(**light) == ("sdpa", "eager")


class There(Tensor):
    is_cpu, is_cuda = False, True
    device = torch.device("cuda", 0)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("n", "heads", "dim", "first"), [
    (100, 32, 128, "triton"), (512, 32, 128, "triton"), (300, 128, 128, "sdpa"), (700, 64, 128, "sdpa"),
    (1024, 32, 128, "triton"), (1500, 32, 128, "triton"), (1024, 128, 128, "sdpa"), (2047, 64, 128, "sdpa"),
    (2048, 32, 128, "triton"), (2048, 4, 128, "sdpa"), (4096, 128, 128, "fa3_fwd"), (1024, 1024, 128, "fa3_fwd"),
    (1024, 8, 64, "triton"), (1500, 12, 64, "sdpa"), (2048, 12, 64, "sdpa"), (3000, 9, 64, "sdpa"),
    (3000, 15, 64, "triton"), (4096, 9, 64, "triton"), (8192, 9, 64, "triton"),
])  # fmt: skip
def test_causal_requests_on_hopper(n: int, heads: int, dim: int, first: str) -> None:
    """As `order` is told of a call: sizes are rounded there. Calls that wait for the host, and longer ones."""
    parts = [
        torch.empty(1, 1, count, 1, dtype=torch.bfloat16).expand(1, n, count, dim).transpose(1, 2)
        for count in (heads, 1, 1)
    ]
    query, key, value = (part.as_subclass(There) for part in parts)
    kind = AttentionCall(query, key, value, causal(n), 1.0).checked_kind()
    assert select.order(kind)[0] == first


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("lacks", ["another device", "an older Triton", "Triton"])
def test_elsewhere_the_order_stays(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks == "another device":
        told_of(monkeypatch, (10, 0))
    elif lacks == "an older Triton":
        monkeypatch.setattr(triton, "__version__", "3.5.1")
    else:
        monkeypatch.setattr(order.TRITON, "missing", lambda: ("triton is not installed",))
    assert "triton" not in order_of()


@pytest.mark.parametrize(("version", "is_there"), [("3.5.1", False), ("3.6.0", True), ("3.10.0", True)])
def test_the_version_of_triton(monkeypatch: pytest.MonkeyPatch, version: str, is_there: bool) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert launch._tried() is is_there
