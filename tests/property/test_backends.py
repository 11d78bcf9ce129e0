"""Every backend against attention in double precision, over calls of every shape."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure

from ..support.calls import (
    HALF,
    ON_CPU,
    assert_right,
    assert_right_gradients,
    attended,
    bound,
    calls,
    gradchecked,
    leaves,
    refuses,
)

EXAMPLES = settings(max_examples=150)
FEWER = settings(max_examples=40)


@pytest.mark.parametrize("name", ON_CPU)
@EXAMPLES
@given(call=calls())
def test_output_equals_the_reference(name: str, call: AttentionCall) -> None:
    assume(not refuses(name, call))
    truth = reference.attention(call)
    found = attended(ON_CPU[name], call)
    assert found.out.dtype == call.query.dtype
    assert found.out.shape == truth.out.shape
    assert torch.isfinite(found.out).all()
    assert float((found.out.double() - truth.out).abs().amax()) <= bound(call, truth.out)
    assert truth.lse is not None
    blind = torch.isinf(truth.lse)
    assert not found.out.transpose(1, 2)[blind & (truth.lse < 0)].any(), "a row that sees nothing is zero"
    if call.need_lse:
        assert found.lse is not None
        assert found.lse.shape == truth.lse.shape
        assert torch.equal(torch.isinf(found.lse), blind)
        largest = max(1.0, float(truth.lse[~blind].abs().amax())) if (~blind).any() else 1.0
        assert float((found.lse.double() - truth.lse)[~blind].abs().sum()) <= 1e-5 * largest * max(1, blind.numel())


@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ON_CPU)
@FEWER
@given(data=st.data())
def test_half_precision_stays_within_its_rounding(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    call = data.draw(calls(dtype=dtype))
    assume(not refuses(name, call))
    found = attended(ON_CPU[name], call).out
    assert found.dtype == dtype
    assert_right(call, found)


@pytest.mark.parametrize("name", ON_CPU)
@FEWER
@given(call=calls())
def test_gradients_equal_those_of_the_reference(name: str, call: AttentionCall) -> None:
    call = replace(call, need_lse=False)
    assume(not refuses(name, leaves(call)[0]))
    assert_right_gradients(call, lambda asked: attended(ON_CPU[name], asked).out)


CASES = {
    "queries before the first key": MaskStructure(2, 2, 3, causal=True, q_offset=-2),
    "one query before a later one": MaskStructure(2, 2, 3, causal=True, q_offset=-1),
    "causal": MaskStructure(2, 4, 4, causal=True),
    "suffix": MaskStructure(2, 2, 5, causal=True, q_offset=3),
    "window": MaskStructure(2, 5, 5, causal=True, window=2, sinks=1),
    "padding": MaskStructure(2, 4, 4, key_padding=torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]]).bool()),
    "mask": MaskStructure(
        2, 4, 4, mask=torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]])[None, None].bool()
    ),
}


@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "bias"])
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("name", ON_CPU)
def test_gradcheck_in_double_precision(name: str, case: str, extra: str) -> None:
    def attend(call: AttentionCall) -> torch.Tensor:
        if refuses(name, call):
            pytest.skip(f"{name} refuses double precision")
        return attended(ON_CPU[name], call).out

    assert gradchecked(attend, CASES[case], extra)


@pytest.mark.parametrize("case", ["causal", "suffix", "window", "padding", "mask"])
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_gradcheck_through_a_fixed_dropout_mask(name: str, case: str) -> None:
    structure = CASES[case]
    tensors = [
        torch.randn(2, heads, length, 3, dtype=torch.float64, requires_grad=True)
        for heads, length in ((4, structure.q_len), (2, structure.kv_len), (2, structure.kv_len))
    ]

    def attend(*tensors: torch.Tensor, seed: int = 3) -> torch.Tensor:
        torch.manual_seed(seed)  # the same entries are dropped each time
        return attended(ON_CPU[name], AttentionCall(*tensors, structure, 0.6, dropout=0.4)).out

    assert not torch.equal(attend(*tensors), attend(*tensors, seed=4)), "something is dropped"
    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True)


@pytest.mark.parametrize("name", ON_CPU)
@FEWER
@given(call=calls())
def test_what_is_not_seen_has_no_influence(name: str, call: AttentionCall) -> None:
    """Later tokens, padding and other documents may hold anything, not-a-number excepted, and no bit changes."""
    assume(not refuses(name, call))
    seen = call.structure.visible().any(dim=2).any(dim=1)
    unseen = ~seen.expand(call.key.shape[0], -1)[:, None, :, None]
    changed = replace(
        call,
        key=torch.where(unseen, call.key * -7 + 3, call.key),
        value=torch.where(unseen, call.value * 50 - 9, call.value),
        structure=call.structure.with_changes(),
    )
    before, after = attended(ON_CPU[name], call).out, attended(ON_CPU[name], changed).out
    assert torch.equal(before, after)


def test_the_bound_notices_a_key_too_many() -> None:
    """The comparison can fail: one key that should be hidden is far outside the bound."""
    query, key, value = (torch.randn(1, 2, 17, 16) for _ in range(3))
    call = AttentionCall(query, key, value, MaskStructure(1, 17, 17, causal=True), 0.25)
    wrong = replace(call, structure=MaskStructure(1, 17, 17, causal=True, q_offset=1))
    truth = reference.attention(call).out
    error = float((attended(ON_CPU["eager"], wrong).out.double() - truth).abs().amax())
    assert error > 1000 * bound(call, truth)
    with pytest.raises(AssertionError, match="a gradient off by"):
        assert_right_gradients(call, lambda asked: 1.001 * attended(ON_CPU["eager"], asked).out)


def test_all_backends_for_processors_are_drawn() -> None:
    assert set(ON_CPU) == {"eager", "sdpa", "native"}
    assert not ON_CPU["eager"].missing()
    assert not ON_CPU["sdpa"].missing()
