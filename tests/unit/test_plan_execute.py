"""What a plan computes: true to the mask, to causality and to the neighbours, and equal to its definition."""

from typing import Any

import pytest
import torch

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall, AttentionResult
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.backends.eager import attention_weights
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.choices import MIN_PREFILL_ROWS, Window
from adaattn_hf.plans.plan import EXACT, Choice, LayerPlan
from adaattn_hf.plans.tensors import LayerTensors

from ..support.choices import make_choice, precision_of
from ..support.plans import defined
from ..support.processor import ROUNDS_BF16

KV, GROUP, D, N = 2, 2, 16, 300
CHOICES = [
    make_choice("window", 48, 4), make_choice(precision="int8"), make_choice(rank=8),
    make_choice("window", 48, 4, rank=8, precision="int8"),
]  # fmt: skip
# kernels of int8 products round the weights, too: tests/native/test_plans.py compares them with the definition
ROUNDED = {"int8": "eager"}
LOOSE = [make_choice(precision="bf16"), make_choice("window", 48, 4, precision="bf16")]


def _tensors() -> LayerTensors:
    generator = torch.Generator().manual_seed(9)
    bases = {head: torch.linalg.qr(torch.randn(D, 8, generator=generator)).Q for head in range(KV)}
    return LayerTensors(torch.randn(KV, D, generator=generator), bases, bases)


def bound_layer_of(choice: Choice, limit: int = 10**6) -> BoundLayer:
    return BoundLayer(LayerPlan(0, "", (choice, EXACT)), _tensors(), limit)


def _qkv(batch: int = 1, n: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, KV * GROUP, n, D, generator=generator) * 2
    key = torch.randn(batch, KV, n, D, generator=generator) + 0.5
    return query, key, torch.randn(batch, KV, n, D, generator=generator)


def _left(cut: int) -> torch.Tensor:
    """The padding of two rows, of which the second one begins so many tokens later."""
    return torch.arange(N) >= torch.tensor([[0], [cut]])


def _run(
    bound_layer: BoundLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rules: object
) -> torch.Tensor:
    structure = MaskStructure(query.shape[0], query.shape[2], key.shape[2], **{"causal": True, **rules})  # type: ignore[arg-type]
    return execute.attend(bound_layer, AttentionCall(query, key, value, structure, D**-0.5)).out


def _structures() -> dict[str, MaskStructure]:
    left = _left(77)
    documents = torch.arange(N)[None].expand(2, -1) // 140
    return {
        "causal": MaskStructure(2, N, N, causal=True),
        "left padding": MaskStructure(2, N, N, causal=True, key_padding=left),
        "right padding": MaskStructure(2, N, N, causal=True, key_padding=left.flip(1)),
        "documents": MaskStructure(2, N, N, causal=True, q_segments=documents, k_segments=documents),
        "own window": MaskStructure(2, N, N, causal=True, window=100),
        "both ways": MaskStructure(2, N, N, key_padding=left),
        "documents both ways": MaskStructure(2, N, N, q_segments=documents, k_segments=documents),
        "window both ways": MaskStructure(2, N, N, window=60),
        "narrow window both ways": MaskStructure(2, N, N, window=10),
        "chunk of a prefill": MaskStructure(2, 60, N, causal=True, q_offset=N - 60),
    }


@pytest.mark.parametrize("name", list(_structures()))
@pytest.mark.parametrize("choice", CHOICES + LOOSE, ids=lambda choice: choice.label)
def test_execution_equals_the_definition(name: str, choice: Choice) -> None:
    structure = _structures()[name]
    query, key, value = _qkv(2)
    call = AttentionCall(query[:, :, -structure.q_len :], key, value, structure, D**-0.5)
    bound_layer = bound_layer_of(choice)
    found = execute.attend(bound_layer, call, ROUNDED.get(precision_of(choice))).out
    tolerance = 2e-2 if precision_of(choice) == "bf16" else 2e-5
    torch.testing.assert_close(found.double(), defined(bound_layer, call), atol=tolerance, rtol=tolerance)
    exact = reference.attention(call).out
    assert (found[:, :, GROUP:].double() - exact[:, :, GROUP:]).abs().max() < 2e-5
    if name == "causal" and (ROUNDS_BF16 or choice.label != "bf16"):  # the approximation is no empty one
        assert not torch.allclose(found[:, :, :GROUP].double(), exact[:, :, :GROUP], atol=1e-6)


@pytest.mark.parametrize("choice", CHOICES + LOOSE, ids=lambda choice: choice.label)
def test_documents_may_be_said_once_for_all_rows(choice: Choice) -> None:
    """Documents of two tokens are steps, beside which longer ones are prefills; one row is padded as well."""
    once = (torch.arange(N)[None] > 139).long() + (torch.arange(N)[None] > N - 3)
    query, key, value = _qkv(2)
    alike, by_row = (
        _run(bound_layer_of(choice), query, key, value, key_padding=_left(77), q_segments=numbers, k_segments=numbers)
        for numbers in (once, once.expand(2, -1))
    )
    assert torch.equal(alike, by_row)


@pytest.mark.parametrize("choice", CHOICES + LOOSE, ids=lambda choice: choice.label)
def test_the_future_changes_nothing(choice: Choice) -> None:
    query, key, value = _qkv()
    bound_layer = bound_layer_of(choice)
    before = _run(bound_layer, query, key, value)
    for tensor in (query, key, value):
        tensor[:, :, 130:] = tensor[:, :, 130:] * -3 + 1
    after = _run(bound_layer, query, key, value)
    torch.testing.assert_close(after[:, :130], before[:, :130], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(after[:, 130:], before[:, 130:], atol=1e-2)


@pytest.mark.parametrize("choice", CHOICES + LOOSE, ids=lambda choice: choice.label)
def test_neighbours_and_padding_change_nothing(choice: Choice) -> None:
    bound_layer = bound_layer_of(choice)
    query, key, value = _qkv(1, N - 80)
    alone = _run(bound_layer, query, key, value)
    others = _qkv(3, N, seed=5)
    padded = [torch.zeros_like(other) for other in others]
    for slot, other, mine in zip(padded, others, (query, key, value), strict=True):
        slot[:] = other
        slot[1, :, 80:] = mine[0]
    padding = torch.ones(3, N, dtype=torch.bool)
    padding[1, :80] = False
    together = _run(bound_layer, *padded, key_padding=padding)
    tolerance = 2e-2 if precision_of(choice) == "bf16" else 2e-5
    torch.testing.assert_close(together[1, 80:], alone[0], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[2]], ids=lambda choice: choice.label)
def test_decode_steps_equal_the_prefill(choice: Choice) -> None:
    bound_layer = bound_layer_of(choice)
    query, key, value = _qkv()
    whole = _run(bound_layer, query, key, value)
    for place in (60, 140, N - 1):
        last, held = query[:, :, place : place + 1], (tensor[:, :, : place + 1] for tensor in (key, value))
        step = _run(bound_layer, last, *held, q_offset=place)
        preallocated = _run(bound_layer, last, key, value, q_offset=torch.tensor(place))
        for found in (step, preallocated):
            torch.testing.assert_close(found[:, 0], whole[:, place], atol=2e-5, rtol=2e-5)


def test_a_decode_step_is_at_least_as_exact_in_precision() -> None:
    query, key, value = _qkv()
    exact = reference.attention(AttentionCall(query, key, value, MaskStructure(1, N, N, causal=True), D**-0.5)).out
    step = _run(bound_layer_of(make_choice(precision="int8")), query[:, :, -1:], key, value, q_offset=N - 1)
    torch.testing.assert_close(step[:, 0].double(), exact[:, -1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("choice", CHOICES + LOOSE, ids=lambda choice: choice.label)
def test_decode_steps_stay_exact_where_the_plan_says_so(choice: Choice) -> None:
    bound_layer = BoundLayer(LayerPlan(0, "", (choice, EXACT)), _tensors(), 10**6, exact_steps=True)
    query, key, value = _qkv()
    whole = AttentionCall(query, key, value, MaskStructure(1, N, N, causal=True), D**-0.5)
    assert torch.equal(execute.attend(bound_layer, whole).out, execute.attend(bound_layer_of(choice), whole).out)
    for rows in (1, MIN_PREFILL_ROWS - 1):
        last = query[:, :, -rows:]
        structure = MaskStructure(1, rows, N, causal=True, q_offset=N - rows)
        step = AttentionCall(last, key, value, structure, D**-0.5)
        torch.testing.assert_close(
            execute.attend(bound_layer, step).out.double(), reference.attention(step).out, atol=2e-5, rtol=2e-5
        )
        weights = execute.weights(bound_layer, step)
        torch.testing.assert_close(weights, attention_weights(step))
        part = bound_layer.of_heads((0,))
        assert part.of_call(1, rows) is None
        assert part.of_call(1, MIN_PREFILL_ROWS) is part


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.label)
def test_rows_beyond_the_calibrated_length_are_exact(choice: Choice) -> None:
    query, key, value = _qkv()
    exact = reference.attention(AttentionCall(query, key, value, MaskStructure(1, N, N, causal=True), D**-0.5)).out
    free = _run(bound_layer_of(choice), query, key, value)
    found = _run(bound_layer_of(choice, limit=150), query, key, value)
    torch.testing.assert_close(found[:, 150:].double(), exact[:, 150:], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found[:, :150], free[:, :150], atol=2e-5, rtol=2e-5)
    assert not torch.allclose(free[:, 150:].double(), exact[:, 150:], atol=1e-4)
    beyond = _run(bound_layer_of(choice, limit=10), query[:, :, 100:], key, value, q_offset=100)
    torch.testing.assert_close(beyond.double(), exact[:, 100:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("side", "limit"), [("none", 150), *((side, limit) for side in ("left", "right") for limit in (100, 240, 5))]
)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: c.label)
def test_rows_are_computed_twice_only_between_a_sequence_within_and_one_beyond(
    choice: Choice, side: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that begins 60 places later is within for 60 places more; of five rows nobody makes a call."""
    query, key, value = _qkv(2)
    padding = _left(60 if side != "none" else 0)
    late, padding = (60, padding) if side == "left" else (0, padding.flip(1))
    exact, asked = select.attend, []

    def noting(call: AttentionCall, backend: str | None = None) -> AttentionResult:
        asked.append(call.query.shape[2])
        return exact(call, backend)

    bound_layer = bound_layer_of(choice, limit)
    monkeypatch.setattr(select, "attend", noting)
    found = _run(bound_layer, query, key, value, key_padding=padding)
    if limit >= MIN_PREFILL_ROWS:  # else the later sequence has too few rows within for a call of their own
        assert asked[-1] == N - limit, "exactly computed are rows from the first that some sequence has beyond"
        assert max(asked[:-1], default=0) <= min(limit + late, N), "and planned none that all have beyond"
    monkeypatch.undo()
    for row in range(2):
        seen = padding[row].nonzero().flatten()
        mine = slice(int(seen[0]), int(seen[-1]) + 1)
        alone = _run(bound_layer, *(tensor[row : row + 1, :, mine] for tensor in (query, key, value)))
        torch.testing.assert_close(found[row : row + 1, mine], alone, atol=3e-5, rtol=3e-5)


def test_a_padded_step_beyond_a_plan_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (query, key, value), padding = _qkv(2), _left(60)
    calls: list[str] = []

    def note(place: Any, name: str) -> None:
        run = getattr(place, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return run(*arguments, **named)

        monkeypatch.setattr(place, name, noting)

    note(select, "attend")
    note(execute, "_planned")
    for limit, expected in ((200, {"attend"}), (239, {"attend"}), (250, {"attend", "_planned"})):
        calls.clear()
        bound_layer = bound_layer_of(CHOICES[0], limit)
        found = _run(bound_layer, query[:, :, -1:], key, value, q_offset=N - 1, key_padding=padding)
        assert set(calls) == expected
        if limit < 250:
            structure = MaskStructure(2, 1, N, causal=True, q_offset=N - 1, key_padding=padding)
            exact = reference.attention(AttentionCall(query[:, :, -1:], key, value, structure, D**-0.5)).out
            torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.label)
def test_weights_are_those_of_the_approximated_function(choice: Choice) -> None:
    query, key, value = _qkv()
    call = AttentionCall(query, key, value, MaskStructure(1, N, N, causal=True), D**-0.5)
    bound_layer = bound_layer_of(choice)
    weights = execute.weights(bound_layer, call)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, KV * GROUP, N), atol=1e-5, rtol=1e-5)
    if precision_of(choice) == "model":
        out = weights @ value.repeat_interleave(GROUP, 1)
        torch.testing.assert_close(out.transpose(1, 2), execute.attend(bound_layer, call).out, atol=2e-5, rtol=2e-5)
    if isinstance(choice.keys, Window):
        assert weights[0, 0, 150, 10:100].abs().max() == 0
        assert weights[0, GROUP, 150, 10:100].abs().max() > 0


@pytest.mark.parametrize("choice", [CHOICES[0], CHOICES[2]], ids=lambda choice: choice.label)
def test_gradients_are_those_of_the_definition(choice: Choice) -> None:
    tensors = [tensor.double().requires_grad_() for tensor in _qkv(1, 150)]
    structure = MaskStructure(1, 150, 150, causal=True)
    call = AttentionCall(*tensors, structure, D**-0.5)  # type: ignore[arg-type]
    bound_layer = bound_layer_of(choice)
    out = execute.attend(bound_layer, call).out
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(out, tensors, upstream)
    wanted = torch.autograd.grad(defined(bound_layer, call), tensors, upstream)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
