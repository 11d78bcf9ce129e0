"""Calls of planned layers are ordinary calls, until anything that matters changes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from adaattn_hf import remove_plan
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.listeners import listening
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import attend
from adaattn_hf.patches.call import extended, interface
from adaattn_hf.patches.mask import structured_mask

from ..support.choices import make_choice
from ..support.models import answers
from ..support.plans import give
from ..support.recorder import Recorder

LAYERS, LENGTH = 4, 256
WINDOW = make_choice("window", 8, 2)


def planned(layers: tuple[int, ...] = (0, 1, 2, 3), choice: Any = WINDOW, depth: int = LAYERS, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="adaattn", pad_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    give(model, choice, layers=layers, lengths=(LENGTH,))
    model.config.adaattn |= settings
    return model


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    long, calls = extended.attend_extended, [0]

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        return long(*arguments)

    monkeypatch.setattr(extended, "attend_extended", counted)
    structured_mask._structures.clear()
    yield calls
    structured_mask._structures.clear()


def logits(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    return answers(model, input_ids=tokens, **inputs)[0]


def slowly(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """The same with every layer decided anew: somebody listens."""
    with listening(Recorder()):
        return logits(model, tokens, **inputs)


def tokens(length: int = 40, batch: int = 2) -> Tensor:
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.native
@pytest.mark.parametrize("backend", [None, "sdpa"], ids=["one call", "a call a choice"])
@pytest.mark.parametrize(
    "choice", [WINDOW, make_choice("window", 8, 2, precision="int8")], ids=["window", "window int8"]
)
def test_a_plan_gives_what_the_long_way_gives_to_the_last_bit(
    anew: list[int], choice: Any, backend: str | None
) -> None:
    model, rows = planned(layers=(0, 2), choice=choice, backend=backend), tokens(200)
    logits(model, rows)
    first = anew[0]
    fast = logits(model, rows)
    assert anew[0] == first, "in one call or several"
    assert torch.equal(fast, slowly(model, rows))
    everywhere = logits(planned(choice=choice, backend=backend), rows)
    assert not torch.allclose(fast, everywhere, atol=1e-5), "layers 1 and 3 were exact"


@pytest.mark.native
def test_padded_batches_and_steps_follow_too(anew: list[int]) -> None:
    model, rows = planned(), tokens()
    real = torch.ones_like(rows)
    real[0, :13] = 0
    logits(model, rows[:, :1])
    before = anew[0]
    fast = logits(model, rows, attention_mask=real)
    assert anew[0] == before
    assert torch.equal(fast, slowly(model, rows, attention_mask=real))
    before = anew[0]
    found = model.generate(rows, attention_mask=real, max_new_tokens=5, do_sample=False)
    assert anew[0] == before
    with listening(Recorder()):
        assert torch.equal(found, model.generate(rows, attention_mask=real, max_new_tokens=5, do_sample=False))


def test_beyond_the_calibrated_length_every_layer_finds_the_exact_rows(anew: list[int]) -> None:
    model, rows = planned(), tokens(LENGTH + 30, 1)
    borders = torch.tensor([0, 20, LENGTH + 30]).int()
    packed = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "attention_mask": torch.ones_like(rows)}
    fast, fast_packed = logits(model, rows), logits(model, rows, use_cache=False, **packed)
    assert anew[0] == 1, "the first layer reads the borders for all"
    assert torch.equal(fast, slowly(model, rows))
    assert torch.equal(fast_packed, slowly(model, rows, use_cache=False, **packed))


def test_settings_without_a_plan_follow_their_backend(anew: list[int]) -> None:
    model = planned()
    remove_plan(model)
    model.config.adaattn = {"backend": "sdpa"}
    fast = logits(model, tokens())
    assert anew[0] == 0
    assert torch.equal(fast, slowly(model, tokens()))


def test_steps_behind_the_calibrated_length_are_ordinary_and_exact(anew: list[int]) -> None:
    model, exact, rows = planned(), planned(), tokens(LENGTH + 30, 1)
    remove_plan(exact)
    found = []
    for one in (model, exact):
        cache = DynamicCache(config=one.config)
        with torch.no_grad():
            one(rows, past_key_values=cache)
            # equal keys, so that the steps differ by their own attention alone
            for layer, behind in zip(cache.layers, range(LAYERS), strict=True):
                generator = torch.Generator().manual_seed(behind)
                layer.keys = torch.randn(layer.keys.shape, generator=generator)
                layer.values = torch.randn(layer.values.shape, generator=generator)
            before = anew[0]
            found.append(one(rows[:, :1], past_key_values=cache).logits)
            assert anew[0] == before
    assert torch.equal(*found)


def test_what_is_changed_between_passes_is_heard(anew: list[int]) -> None:
    model, rows = planned(), tokens()
    with_plan = logits(model, rows)
    remove_plan(model)
    exact = logits(model, rows)
    assert not torch.allclose(exact, with_plan, atol=1e-5)
    give(model, make_choice("window", 16, 2), layers=(0, 1, 2, 3), lengths=(LENGTH,))
    other = logits(model, rows)
    assert torch.equal(other, slowly(model, rows))
    assert not torch.allclose(other, with_plan, atol=1e-5)


def test_whoever_watches_sees_every_layer(anew: list[int]) -> None:
    """Also where the settings are changed in place, between two passes over the same structure."""
    model, rows = planned(), tokens()
    logits(model, rows)
    model.config.adaattn["monitor"] = True
    before = anew[0]
    logits(model, rows)
    assert anew[0] - before == LAYERS


def test_weights_that_were_only_moved_are_checked_and_served(anew: list[int]) -> None:
    model, rows = planned(), tokens()
    before, moved = logits(model, rows), model.model.layers[1].self_attn.q_proj.weight
    moved.data = moved.data.clone()
    assert torch.equal(logits(model, rows), before)


def test_gradients_flow_under_a_plan(anew: list[int]) -> None:
    model, rows = planned(), tokens()
    model(rows).logits.sum().backward()
    assert anew[0] == 0
    assert model.model.layers[3].self_attn.k_proj.weight.grad.abs().sum() > 0


@pytest.mark.native
def test_windows_and_sinks_are_kinds_of_their_own() -> None:
    """A chunk need not hold the first keys of its sequence: kernels that walk runs serve its windows, not its sinks."""
    structure, query = MaskStructure(1, 40, 40, causal=True, chunk=16), torch.zeros(1, 1, 40, 16)
    rules = [HeadRules((8,), (sinks,), ("model",)) for sinks in (0, 2)]
    asked = [AttentionCall(query, query, query, structure, 1.0, per_head=one) for one in rules]
    assert [one.checked_kind().shape for one in asked] == ["ragged", "irregular"]
    outs = []
    for sinks in (0, 2, 0):
        tensors = [torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        call = AttentionCall(*tensors, structure, 0.25, per_head=HeadRules((8,), (sinks,), ("model",)))
        outs.append(attend(call).out)
        torch.testing.assert_close(outs[-1].double(), reference.attention(call).out, atol=1e-5, rtol=0)
    assert torch.equal(outs[0], outs[2])
    assert not torch.allclose(outs[0], outs[1])


@pytest.mark.native
def test_a_planned_step_calls_few_functions(anew: list[int]) -> None:
    """On a processor, masks, caches and weight checks included: at most 15 a layer, in the mean of 24."""
    model, rows = planned(layers=tuple(range(24)), depth=24), tokens(20, 1)
    cache, calls, files = DynamicCache(config=model.config), [0], set[str]()
    root = str(Path(interface.__file__).parents[2])
    rooms = tuple(f"{root}/{room}/" for room in ("adaattn_hf", "patches"))

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(rooms):
            calls[0] += 1
            files.add(name)

    with torch.no_grad():
        for _ in range(3):
            model(rows, past_key_values=cache)
        model(rows[:, :1], past_key_values=cache)
        before = anew[0]
        sys.setprofile(note)
        try:
            model(rows[:, :1], past_key_values=cache)
        finally:
            sys.setprofile(None)
    assert anew[0] == before
    assert calls[0] <= 15 * 24
    assert not any(name.endswith("extended.py") for name in files)
