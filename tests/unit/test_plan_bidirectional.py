"""What a plan means where attention looks both ways: symmetric windows, exact rows beyond its length."""

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.plans import execute
from adaattn_hf.plans.plan import Choice

from ..support.choices import make_choice
from ..support.plans import defined
from .test_plan_execute import bound_layer_of

HEADS, D, N = 2, 16, 270
WINDOW = make_choice("window", 24, 4)
RIGHT = torch.ones(2, N, dtype=torch.bool)
RIGHT[1, 190:] = False
DOCUMENTS = torch.arange(N)[None].expand(2, -1) // 100
STRUCTURES = {
    "full": MaskStructure(2, N, N),
    "right padding": MaskStructure(2, N, N, key_padding=RIGHT),
    "documents": MaskStructure(2, N, N, q_segments=DOCUMENTS, k_segments=DOCUMENTS),
}


def request_of(structure: MaskStructure, seed: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, HEADS, N, D, generator=generator) for _ in range(3))
    return AttentionCall(query * 2, key, value, structure, D**-0.5)


def test_a_window_looks_as_far_ahead_as_back_and_keeps_the_first_keys() -> None:
    call = request_of(STRUCTURES["full"])
    weights = execute.weights(bound_layer_of(WINDOW), call)[0, 0]
    rows, keys = torch.arange(N)[:, None], torch.arange(N)
    assert torch.equal(weights > 0, ((rows - keys).abs() < 24) | (keys < 4))
    documents = execute.weights(bound_layer_of(WINDOW), request_of(STRUCTURES["documents"]))[0, 0]
    assert documents[150, 100:104].min() > 0, "sinks are the first keys of the row's own document"
    assert documents[150, :100].max() == 0


@pytest.mark.parametrize(("name", "limit", "planned"), [
    ("right padding", 200, [[False] * N, [True] * N]),  # rows of padding are nobody's
    ("documents", 80, [[False] * 200 + [True] * 70] * 2),
])  # fmt: skip
def test_sequences_longer_than_the_plan_speaks_for_are_exact_as_a_whole(
    name: str, limit: int, planned: list[list[bool]]
) -> None:
    """Each of their rows sees all keys; a short neighbour is planned none the less."""
    call, bound_layer = request_of(STRUCTURES[name]), bound_layer_of(WINDOW, limit)
    within = execute.rows_within(call.structure, limit, torch.device("cpu"))
    assert isinstance(within, torch.Tensor)
    wanted = torch.tensor(planned)
    assert torch.equal(within.expand(2, -1), wanted)
    found = execute.attend(bound_layer, call).out
    mixed = torch.where(wanted[:, :, None, None], defined(bound_layer_of(WINDOW), call), reference.attention(call).out)
    torch.testing.assert_close(found.double(), mixed, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_documents_may_be_numbered_in_any_order(padded: bool) -> None:
    """They have 100, 100 and 70 tokens; of the second row, where it is padded, 100, 90 and none."""
    numbers = torch.tensor([7, -3, 2])[DOCUMENTS]
    structure = MaskStructure(2, N, N, key_padding=RIGHT if padded else None, q_segments=numbers, k_segments=numbers)
    within = execute.rows_within(structure, 95, torch.device("cpu"))
    assert isinstance(within, torch.Tensor)
    assert within[0].tolist() == [False] * 200 + [True] * 70
    assert within[1].tolist() == [False] * 100 + [padded] * 100 + [True] * 70
    alike = structure.with_changes(k_segments=numbers[:1])
    assert torch.equal(execute.rows_within(alike, 95, torch.device("cpu")), within)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("first", "stop"), [(0, N), (40, 200), (250, N)])
@pytest.mark.parametrize("choice", [WINDOW, make_choice("window", 200, 16)], ids=lambda choice: choice.label)
def test_rows_with_fewer_keys_are_counted_right(choice: Choice, first: int, stop: int, causal: bool) -> None:
    structure = MaskStructure(1, N, N, causal=causal)
    assert choice.keys is not None
    kv = torch.zeros(1, 1, N, 4)
    narrowed = choice.keys.structure(AttentionCall(kv, kv, kv, structure, 1.0))
    fewer = (structure.visible() & ~narrowed.visible()).any(-1)[0, 0]
    wanted = int(fewer[first:stop].sum())
    assert choice.rows_with_fewer_keys(first, stop, N, causal) == wanted
