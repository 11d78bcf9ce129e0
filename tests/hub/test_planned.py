"""The kernel `adaattn` through Transformers' loader: exact without a plan, with a plan what the package computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import adaattn_hf
from adaattn_hf.plans.choices import Choice, Precision, Window
from adaattn_hf.plans.plan import PlanError

from ..support.plans import give
from ..support.processor import ROUNDS_BF16
from .models import FAMILIES, beside_stock, padded_batch

pytest.importorskip("kernels", reason="the package kernels is not installed; `make hub-test` has it")
tf = pytest.importorskip("transformers")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("local")]
NAME, GREEDY = "adaattn/adaattn", dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
CHOICES = {"window": Choice.of(Window(3, sinks=1)), "bf16": Choice.of(Precision("bf16"))}


def planned(family: str, choice: Choice, **changes: Any) -> tuple[Any, Any, Any]:
    stock, ours = beside_stock(family, NAME)
    _, package = beside_stock(family, "adaattn")
    plan = give(package, choice, lengths=(4096,))
    adaattn_hf.load_plan(package, unverified=True)
    ours.config.adaattn = {"plan": replace(plan, **changes).to_dict()}
    return stock, package, ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_exact_without_a_plan(family: str, side: str) -> None:
    stock, ours = beside_stock(family, NAME)
    ids, mask = padded_batch(side)
    for asked in ({"attention_mask": mask}, {"attention_mask": None}):
        with torch.no_grad():
            right, found = stock(ids, **asked).logits, ours(ids, **asked).logits
        real = mask.bool() if asked["attention_mask"] is not None else torch.ones_like(mask).bool()
        torch.testing.assert_close(found[real], right[real], atol=2e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_exact_generation(family: str, cache: str | None) -> None:
    stock, ours = beside_stock(family, NAME)
    ids, mask = padded_batch()
    asked: dict[str, Any] = dict(GREEDY, attention_mask=mask, cache_implementation=cache)
    assert torch.equal(ours.generate(ids, **asked), stock.generate(ids, **asked))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_plan_is_what_the_package_computes(choice: str, side: str) -> None:
    stock, package, ours = planned("llama", CHOICES[choice])
    ids = torch.randint(3, 100, (2, 200), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 50) if side == "left" else slice(150, 200)] = 0
    with torch.no_grad():
        exact, right, found = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (stock, package, ours))
    torch.testing.assert_close(found, right, atol=2e-6, rtol=0)
    does_something = ROUNDS_BF16 or choice != "bf16"
    assert ((right - exact).abs().max() > 1e-4) == does_something


@pytest.mark.parametrize("choice", CHOICES)
def test_a_plan_in_generation(choice: str) -> None:
    _, package, ours = planned("llama", CHOICES[choice])
    ids, padded = padded_batch()
    for mask in (padded, torch.ones_like(padded)):  # without padding decode steps come without a mask
        asked: dict[str, Any] = dict(GREEDY, attention_mask=mask)
        assert torch.equal(ours.generate(ids, **asked), package.generate(ids, **asked))


def test_a_plan_for_other_weights_is_refused() -> None:
    _, _, ours = planned("llama", CHOICES["window"])
    ids, _ = padded_batch()
    with torch.no_grad():
        ours.model.layers[0].self_attn.q_proj.weight.mul_(1.01)
    with pytest.raises(ValueError, match="the weights of layer 0 are not those"):
        ours(ids)


def test_a_plan_with_a_file_of_tensors_is_refused() -> None:
    _, _, ours = planned("llama", CHOICES["window"], tensors="0" * 64)
    with pytest.raises(ValueError, match="calibrated tensors in a file"):
        ours(padded_batch()[0])
    assert issubclass(PlanError, ValueError)


def test_a_plan_beside_a_mask_of_another_making_is_refused() -> None:
    stock, _, ours = planned("llama", CHOICES["window"])
    ids, _ = padded_batch()
    odd = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    odd[:, :, 7, 2] = False
    with pytest.raises(ValueError, match="attention_mask: got a mask that is not made of padding"):
        ours(ids, attention_mask=odd)
    del ours.config.adaattn
    added = torch.zeros(3, 1, 12, 12).masked_fill(~odd, -torch.inf)
    with torch.no_grad():
        found, right = ours(ids, attention_mask=odd).logits, stock(ids, attention_mask=added).logits
    torch.testing.assert_close(found, right, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"), [({"monitor": True}, "monitoring needs the package"), ({"bakend": "x"}, "bakend")]
)
def test_settings_are_read_and_weights_refused(settings: dict[str, Any], words: str) -> None:
    _, ours = beside_stock("llama", NAME)
    with pytest.raises(ValueError, match="output_attentions"):
        ours(padded_batch()[0], output_attentions=True)
    ours.config.adaattn = settings
    with pytest.raises(ValueError, match=words):
        ours(padded_batch()[0])


def test_the_package_is_not_what_answers() -> None:
    """The tests above import the package; the kernel's function is its own module's."""
    beside_stock("llama", NAME)
    function = tf.AttentionInterface._global_mapping[NAME]
    assert function.__module__.startswith("_adaattn_cpu_")
    assert adaattn_hf.__name__ not in function.__module__
