"""Steps over keys in pages, under Triton's interpreter, against the reference: where they lie changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.pages import Pages
from adaattn_hf.backends.triton import TritonBackend

from ..support.head_rules import rules
from .test_triton import EXTRAS, interpreted, on_processors

pytest.importorskip("triton")

from adaattn_hf.backends.triton import step

LENGTHS = (70, 1, 0, 33, 128, 5, 0)
"""Of sequences; the last one and one between are padding, as in captured steps."""


def paged(lengths: tuple[int, ...], page: int, kv_heads: int = 2, dim: int = 16, **asked: Any) -> AttentionCall:
    """A step of sequences of these lengths, whose pages lie in any order; what belongs to none is not a number."""
    g = torch.Generator().manual_seed(0)
    most, count = -(-max(lengths) // page) + 1, sum(-(-n // page) for n in lengths) + 2
    order = iter(torch.randperm(count, generator=g).tolist())
    table = torch.full((len(lengths), most), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for place in range(-(-length // page)):
            table[row, place] = next(order)
    borders = torch.tensor((0, *lengths)).cumsum(0).int()
    dtype, device = asked.pop("dtype", torch.float32), asked.pop("device", "cpu")
    structure = Pages.of(table, borders, page, count * page, asked.pop("window", None))
    structure.sinks = asked.pop("sinks", 0)
    query = torch.randn(1, len(lengths), 4, dim, generator=g).to(dtype).permute(1, 2, 0, 3)
    numbers = [torch.randn(count * page, kv_heads, dim, generator=g).to(dtype) for _ in range(2)]
    own = [torch.randn(1, kv_heads, len(lengths), dim, generator=g).to(dtype).transpose(0, 2) for _ in range(2)]
    places, there = structure.places("cpu")
    for tensor in numbers:
        unread = torch.ones(count * page, dtype=torch.bool)
        unread[places[there]] = False
        tensor[unread] = torch.nan
        tensor[last(structure)[1]] = torch.nan
    key, value = (t.to(device).transpose(0, 1)[None].expand(len(lengths), -1, -1, -1) for t in numbers)
    structure.table, structure.borders = table.to(device), borders.to(device)
    own_key, own_value = (tensor.to(device) for tensor in own)
    return AttentionCall(query.to(device), key, value, structure, 0.3, new_tokens=(own_key, own_value), **asked)


def last(structure: Pages) -> tuple[Tensor, Tensor]:
    """Which sequences have keys, and where the last of each lies."""
    device = structure.borders.device
    at = structure.positions(device)[:, 0]
    rows = (at >= 0).nonzero()[:, 0]
    return rows, structure.places(device)[0][rows, at[rows]]


def truth(call: AttentionCall) -> Tensor:
    """Attention over the pages as a step leaves them; what nobody reads is zero."""
    rows, places = last(call.structure)  # type: ignore[arg-type]
    key, value = (t[0].nan_to_num(0).clone() for t in (call.key, call.value))
    assert call.new_tokens is not None
    for tensor, own in ((key, call.new_tokens[0]), (value, call.new_tokens[1])):
        tensor[:, places] = own[rows, :, 0].transpose(0, 1)
    batch = len(call.query)
    return reference.attention(
        replace(call, key=key.expand(batch, -1, -1, -1), value=value.expand(batch, -1, -1, -1))
    ).out


def attend(call: AttentionCall) -> Tensor:
    return TritonBackend().kernel(call.checked_kind(), call.per_head)(call).out


def check(call: AttentionCall, atol: float = 4e-6) -> None:
    right = truth(call)
    torch.testing.assert_close(attend(call).double(), right, atol=atol, rtol=0)


@interpreted
@pytest.mark.parametrize("page", [4, 16, 20, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_equals_the_reference(page: int, window: int | None) -> None:
    call = paged(LENGTHS, page, window=window, sinks=3 if window else 0)
    check(call)
    rows, places = last(call.structure)  # type: ignore[arg-type]
    assert call.new_tokens is not None
    for tensor, own in zip((call.key, call.value), call.new_tokens, strict=True):
        assert torch.equal(tensor[0, :, places], own[rows, :, 0].transpose(0, 1)), "written where they belong"
        assert tensor[0, 0, :, 0].isnan().sum() == tensor.shape[2] - sum(LENGTHS), "and nowhere else"


@interpreted
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_other_mathematics(extra: str, kv_heads: int) -> None:
    check(paged(LENGTHS, 16, kv_heads, 24, dtype=torch.half, **EXTRAS[extra]), 4e-3)


@interpreted
@pytest.mark.parametrize("processors", [2, 16])
@pytest.mark.parametrize(("until", "window"), [(None, None), (64, None), (600, None), (None, 300)])
def test_heads_have_windows_up_to_a_position(
    until: int | None, window: int | None, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences beside short ones; a layer may have a window of its own; with few shares and with many."""
    on_processors(processors, monkeypatch)
    asked = replace(rules((0, 9), (0, 2)), until=until)
    check(paged((1400, 3, 0, 700, 64), 128, per_head=asked, window=window))


@interpreted
@pytest.mark.parametrize("windows", [(0, 9), (9, 9)])
def test_what_windows_leave_is_shared_out(windows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that read all have more shares beside windows; where windows end all have as many as without any."""
    seen: list[Any] = []
    monkeypatch.setattr(step, "decode", lambda grid, arguments, *_: seen.append((grid[1], *arguments[26:28])))
    on_processors(6, monkeypatch)
    for asked in (None, replace(rules(windows, (0, 0)), until=5000)):
        attend(paged((4000, 4000), 128, per_head=asked))
    (programs, exact, whole), (planned, most, ended) = seen
    assert (programs, exact, whole) == (2 * 3, 3, 3), "12 programs for 2 sequences of 2 heads"
    assert (planned, ended) == (2 * most, exact)
    assert most == (5 if 0 in windows else exact)


@interpreted
def test_shares_follow_from_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows how much a table has room for, and nothing of lengths: it never reads them."""

    class Unread(Tensor):
        def tolist(self) -> Any:
            raise AssertionError("the host read it")

        __int__ = __bool__ = item = tolist

    call = paged((900, 40, 513), 64)
    right = truth(call)
    structure = call.structure
    assert isinstance(structure, Pages)
    hidden = structure.with_changes(
        table=structure.table.as_subclass(Unread), borders=structure.borders.as_subclass(Unread)
    )
    torch.testing.assert_close(attend(replace(call, structure=hidden)).double(), right, atol=4e-6, rtol=0)


def test_layers_of_a_captured_step_share_their_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set to zero once, and another step has its own."""
    made: list[Any] = []
    monkeypatch.setattr(step, "capturing", lambda device: True)
    monkeypatch.setattr(step, "decode", lambda grid, arguments, *_: made.append(arguments[7]))
    one, other = paged((600, 30), 64), paged((600, 30), 64)
    for call in (one, one, other):
        attend(call)
    assert made[0] is made[1]
    assert made[2] is not made[0]


def test_other_backends_refuse_pages() -> None:
    from adaattn_hf.backends.select import BACKENDS, refusals_of

    kind = paged((3, 2), 4).checked_kind()
    for name in BACKENDS.keys() - {"triton"}:
        assert any("no keys and values in pages" in reason for reason in refusals_of(name, kind)), name
