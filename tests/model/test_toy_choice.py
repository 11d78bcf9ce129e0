"""A choice that only this file knows goes from candidates through calibration, storing and loading to running."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from transformers import AutoModelForCausalLM

import adaattn_hf
from adaattn_cli.pictures.headline import heat_map
from adaattn_cli.pictures.page import plan_page
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.calibration.settings import Calibration, CalibrationSettings
from adaattn_hf.patches.plans import attach
from adaattn_hf.plans.choices import EXACT, Choice, Keys, Precision, Setting, register
from adaattn_hf.plans.choices.part import KINDS, Colour
from adaattn_hf.plans.plan import LayerPlan, PlanError
from adaattn_hf.plans.tensors import LayerTensors
from adaattn_hf.policy.candidates import FAMILIES, candidates, refuse_unknown

from ..support.calibration import calibrate, price_table, save_plan
from ..support.letters import encode, lettered_llama, random_words

LENGTH = 192


@dataclass(frozen=True)
class EverySecond(Keys):
    """The last `near` keys, and every second one before them."""

    near: int

    name = "every_second"
    families = ("every_second",)

    @property
    def label(self) -> str:
        return f"e{self.near}"

    @property
    def meaning(self) -> str:
        return f"the last {self.near} keys, and every second one before them"

    def tinted(self, colour: Colour) -> Colour:
        return 200, 160, 30

    def structure(self, call: AttentionCall) -> MaskStructure:
        structure = call.structure
        places = torch.arange(structure.q_len)[:, None] + structure.offset()
        keys = torch.arange(structure.kv_len)
        kept = ((places - keys) < self.near) | (keys % 2 == 0)
        return structure.with_changes(mask=kept[None, None])

    def rows_with_fewer_keys(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        return max(stop - max(first, self.near + 1), 0)

    @classmethod
    def candidates(cls, setting: Setting) -> Sequence[Self]:
        return [cls(near) for near in (128, 160) if near < setting.length]


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    register(EverySecond)
    yield
    del KINDS[EverySecond.name]


@pytest.fixture(scope="module")
def model() -> Any:
    return lettered_llama(layers=2)


@pytest.fixture(scope="module")
def result(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    path = random_words(tmp_path_factory.mktemp("text") / "book.txt")
    row = {"exact": 1.0, "bf16": 2.0, "e128": 0.5, "e128 bf16": 2.0, "e160": 0.6, "e160 bf16": 2.0}
    settings = CalibrationSettings(
        budget=2e-2, lengths=(LENGTH,), sequences=2, rows=32, labels=1, held_out=4, needles=2,
        families=("every_second", "bf16"),
    )  # fmt: skip
    return calibrate(model, encode, [path], settings, prices=price_table(LENGTH, row))


def test_it_is_a_candidate_and_crosses_with_precisions() -> None:
    found = candidates(Setting(LENGTH, 32, "float32", ("every_second", "bf16"), ())).choices
    assert [choice.label for choice in found] == ["exact", "bf16", "e128", "e128 bf16", "e160", "e160 bf16"]
    refuse_unknown(("every_second",))
    assert not any(
        "e128" in choice.label for choice in candidates(Setting(LENGTH, 32, "float32", FAMILIES, ())).choices
    )


def test_calibration_chooses_and_proves_it(result: Calibration) -> None:
    assert result.met, result.sentence
    chosen = {choice for layer in result.plan.layers for choice in layer.choices}
    assert any(isinstance(choice.keys, EverySecond) for choice in chosen), chosen
    assert any(unit.risk > 0 and unit.dropped_mass > 0 for unit in result.plan.units)
    assert result.plan.verified is not None
    assert result.plan.verified.activation_keys > 0


def test_it_is_stored_loaded_and_run(model: Any, result: Calibration, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    save_plan(model, result, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="adaattn").eval()
    assert adaattn_hf.plan_of(adaattn_hf.load_plan(again)) == result.plan
    tokens = torch.randint(0, 128, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    exact = lettered_llama(layers=2)
    with torch.no_grad(), adaattn_hf.monitoring(again) as watching:
        found = again(tokens).logits
        assert (found - exact(tokens).logits).abs().max() > 1e-5
    with torch.no_grad():
        assert torch.equal(found, model(tokens).logits)
    assert sum(layer.fewer_keys for layer in watching.layers.values()) > 0
    attach.remove_plan(again)
    attach.remove_plan(model)


def test_what_runs_is_what_it_defines(result: Calibration) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 50, 8, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(query, key, value, MaskStructure(1, 50, 50, causal=True), 8**-0.5)
    toy = EverySecond(16)
    visible = toy.structure(call).visible(rows=torch.tensor([40]))[0, 0, 0]
    assert visible.nonzero()[:, 0].tolist() == [*range(0, 25, 2), *range(25, 41)]
    out = Choice.of(toy).attend(call, [0, 1], LayerTensors(), None).out
    weights = torch.softmax(
        (query @ key.repeat_interleave(2, 1).mT * 8**-0.5)[:, :, 40].masked_fill(~visible, -torch.inf), -1
    )
    wanted = torch.einsum("bhk,bhkd->bhd", weights, value.repeat_interleave(2, 1))
    torch.testing.assert_close(out[:, 40], wanted, atol=1e-5, rtol=1e-5)


def test_it_is_written_shown_and_refused_where_it_is_unknown(
    result: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = Choice.of(EverySecond(16), Precision("bf16"))
    assert Choice.from_dict(choice.to_dict()) == choice
    assert choice.colour != EXACT.colour
    plan = result.plan
    assert heat_map(plan).row_count > 0
    other = replace(plan, layers=(LayerPlan(0, plan.layers[0].weights, (choice, choice)),))
    assert '"e16 bf16"' in plan_page(other)
    monkeypatch.delitem(KINDS, EverySecond.name)
    with pytest.raises(PlanError, match="every_second"):
        type(plan).from_json(plan.to_json())
