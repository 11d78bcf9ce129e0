"""Runs with an offset each: what they see, where their queries stand, and every backend over them."""

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.reference import attention
from adaattn_hf.attention.runs import Runs, aligned_runs
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.plans.execute import rows_within

Q, K = (0, 90, 91, 400, 420), (0, 90, 400, 800, 1000)
RULES = [(None, 0), (70, 0), (70, 3)]


def structure(window: int | None, sinks: int) -> MaskStructure:
    return Runs.of(aligned_runs(Q, K, 425, 1010, True), 1, 425, 1010, True, window).with_changes(sinks=sinks)


def alone(window: int | None, sinks: int, n: int) -> MaskStructure:
    q_len, k_len = Q[n + 1] - Q[n], K[n + 1] - K[n]
    return MaskStructure(1, q_len, k_len, True, k_len - q_len, window, sinks)


@pytest.mark.parametrize(("window", "sinks"), RULES)
def test_a_run_sees_what_it_would_see_alone(window: int | None, sinks: int) -> None:
    made = structure(window, sinks)
    seen = made.visible()
    for n in range(4):
        own = alone(window, sinks, n)
        block = seen[:, :, Q[n] : Q[n + 1]]
        assert torch.equal(block[..., K[n] : K[n + 1]], own.visible().expand(1, 1, -1, -1))
        assert block.sum() == block[..., K[n] : K[n + 1]].sum(), "nothing of another run"
        assert torch.equal(made.positions("cpu")[:, Q[n] : Q[n + 1]], own.positions("cpu"))
    assert not seen[:, :, 420:].any()
    assert torch.equal(made.visible(80, 100), seen[:, :, 80:100])
    rows = torch.tensor([5, 90, 410])
    assert torch.equal(made.visible(rows=rows), seen[:, :, rows])


@pytest.mark.parametrize(("window", "sinks"), RULES)
@pytest.mark.parametrize("backend", ["native", "sdpa", "eager"])
def test_backends_compute_each_run_alone(backend: str, window: int | None, sinks: int) -> None:
    query, key, value = torch.randn(1, 4, 425, 16), torch.randn(1, 2, 1010, 16), torch.randn(1, 2, 1010, 16)
    out = select.attend(AttentionCall(query, key, value, structure(window, sinks), 0.25), backend).out
    for n in range(4):
        q, k = slice(Q[n], Q[n + 1]), slice(K[n], K[n + 1])
        own = AttentionCall(query[:, :, q], key[:, :, k], value[:, :, k], alone(window, sinks, n), 0.25)
        torch.testing.assert_close(out[:, q], attention(own).out.float(), atol=1e-5, rtol=1e-5)
    assert not out[:, 420:].any()


def test_places_say_without_data_which_rows_a_plan_speaks_for() -> None:
    made = structure(None, 0)
    assert made.query_positions == (0, 400)
    assert rows_within(made, 400, torch.device("cpu")) is True
    assert torch.equal(rows_within(made, 300, torch.device("cpu")), made.positions("cpu") < 300)
    runs = [run._replace(q_start=0) for run in aligned_runs((0, 1), (0, 50), 1, 60, True)]
    steps = Runs.of(runs, 1, 1, 60, True, None)
    assert steps.query_positions == (49, 50)
    assert rows_within(steps, 49, torch.device("cpu")) is False
    assert MaskStructure(1, 3, 9, True, 6).query_positions == (6, 9)
    assert MaskStructure(1, 3, 9, True, torch.tensor(6)).query_positions is None


@pytest.mark.parametrize(("cu_q", "cu_k", "words"), [
    ((0, 4), (0, 4, 8), "^cu_seqlens_k: got 3 entries"),
    ((0, 4, 3), (0, 4, 8), "^cu_seqlens_q: got .* running sums"),
    ((0, 4), (0, 99), "^cu_seqlens_k: got .* at most 9 tokens"),
])  # fmt: skip
def test_sums_that_cannot_be_are_refused(cu_q: tuple[int, ...], cu_k: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        aligned_runs(cu_q, cu_k, 9, 9, True)
