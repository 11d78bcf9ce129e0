"""The study over seeds: losses and prices apart, a file per seed, nothing measured twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import adaattn_hf.calibration.measure as calibration
from adaattn_hf.calibration.arms import ModelArms
from adaattn_hf.calibration.calibrate import CalibrationSettings
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages
from adaattn_hf.patches.plans import attach, fit
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.plans.plan import Plan
from adaattn_hf.policy.prices import PriceTable
from studies.budget import speed, study

from ..support.calibration import price_table

LENGTH = 192
LABELS = ("exact", "bf16", "w64+16", "w64+16 bf16")
SETTINGS = CalibrationSettings(
    lengths=(LENGTH,), sequences=1, rows=32, labels=1, joint=2, held_out=3, tries=2, haystacks=0, windows=(64,),
    families=("window", "bf16"),
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("text")
    own, other = directory / "own.txt", directory / "other.txt"
    own.write_text("\n\n".join(calibration_pages()[:12]), encoding="utf-8")
    other.write_text("\n\n".join(heldout_pages()[:12]), encoding="utf-8")
    return [own, other]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = {label: 1.0 / (1 + place) for place, label in enumerate(LABELS)}
    path = tmp_path_factory.mktemp("prices") / "prices.json"
    path.write_text(price_table(LENGTH, row).to_json())
    return path


def test_a_seed_is_measured_once_for_all_budgets_and_never_again(
    text: list[Path], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, encode = study.load(str(demo_model_path("llama")), "float32", "cpu", None, None)
    prices = PriceTable.from_json(table.read_text())
    runs: list[Any] = []
    real = calibration.measure

    def counted(*args: Any, **more: Any) -> Any:
        runs.append(args)
        return real(*args, **more)

    monkeypatch.setattr(calibration, "measure", counted)
    arms = study.remembering(ModelArms(model))

    def measured(settings: CalibrationSettings, *budgets: float) -> list[Path]:
        own = {"check_data": text[:1], "check": 2, "arms": arms}
        return study.seed_study(model, encode, text[:1], text[1:], prices, settings, budgets, tmp_path, **own)

    paths = measured(SETTINGS, 1e-12, 0.5)
    assert len(runs) == 1
    none, much = (json.loads(path.read_text()) for path in paths)
    assert not none["met"]
    assert set(none["picks"]) == {"exact"}
    assert much["met"]
    assert set(much["picks"]) != {"exact"}
    assert much["ratio"][str(LENGTH)] > 1.0 == none["ratio"][str(LENGTH)]
    assert much["settings"]["data"] == much["settings"]["check_data"] == ["own.txt"]
    assert none["check"][str(LENGTH)]["upper"] == 0.0 < much["check"][str(LENGTH)]["kl"]
    assert much["check"][str(LENGTH)]["tokens"] == 2 * (LENGTH - 1)
    kept = Plan.from_pretrained(tmp_path / "plans" / paths[1].stem)
    assert [choice.label for layer in kept.layers for choice in layer.choices] == much["picks"]
    assert attach.plan_of(model) is None
    assert much["prices"] == prices.digest
    assert measured(SETTINGS, 1e-12, 0.5) == paths
    assert len(runs) == 1
    paths[0].unlink()
    measured(SETTINGS, 1e-12, 0.5)
    assert len(runs) == 2
    again = json.loads(paths[0].read_text())
    assert again["report"] == none["report"]
    with pytest.raises(UsageError, match="measured with other settings"):
        measured(replace(SETTINGS, rows=16), 0.5)


def test_commands_stop_at_the_limit_and_refuse_wrong_arguments(
    text: list[Path], table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [str(demo_model_path("llama")), "--data", str(text[0]), "--verify-data", str(text[1])]
    common += ["--prices", str(table), "--lengths", str(LENGTH), "--families", "bf16"]
    with pytest.raises(SystemExit) as stopped:
        study.main(["seeds", *common, "--output", str(tmp_path), "--limit", "0"])
    assert stopped.value.code == 3
    assert "stopped before seed 0" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        study.main(["seeds", *common, "--output", str(tmp_path), "--seeds", "a-b"])
    assert refused.value.code == 2
    assert "got 'a-b'" in capsys.readouterr().err


def test_seeds_are_numbers_and_ranges() -> None:
    assert study.numbers("0-3,7") == [0, 1, 2, 3, 7]


def test_prices_are_those_of_this_machine(text: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "prices.json"
    common = [str(demo_model_path("llama")), "--data", str(text[0]), "--lengths", str(LENGTH)]
    with pytest.raises(SystemExit) as ended:
        study.main(["prices", *common, "--families", "bf16", "--output", str(target)])
    assert ended.value.code == 0
    assert set(PriceTable.from_json(target.read_text()).prices["prefill"][LENGTH]) == {"exact", "bf16"}


def test_speed_under_a_recorded_plan(text: list[Path], table: Path, tmp_path: Path) -> None:
    model, encode = study.load(str(demo_model_path("llama")), "float32", "cpu", None, None)
    prices = PriceTable.from_json(table.read_text())
    seed = study.seed_study(model, encode, text[:1], text[1:], prices, SETTINGS, [0.5], tmp_path)[0]
    target = tmp_path / "speed.json"
    arguments = [
        str(demo_model_path("llama")),
        "--data",
        str(text[1]),
        "--output",
        str(target),
        "--rounds",
        "1",
    ]
    arguments += ["--lengths", str(LENGTH), "--record", f"much={seed}", "--monitor", "much"]
    for level in ("attention", "model"):
        with pytest.raises(SystemExit) as ended:
            speed.main([*arguments, "--level", level])
        assert ended.value.code == 0
    with pytest.raises(SystemExit):
        speed.main([*arguments[:-2], "--level", "model", "--batch", "3"])
    found = json.loads(target.read_text())
    together = found["model"][f"3 x {LENGTH}"]
    assert set(together) == {"stock sdpa", "exact", "much"}
    assert "kl" not in together["much"]
    assert set(found["attention"][str(LENGTH)]) == {"stock sdpa", "exact", "much"}
    cells = found["model"][str(LENGTH)]
    assert set(cells) == {"stock sdpa", "exact", "much", "much, monitored"}
    assert all(cell["seconds"] > 0 and cell["new_length"] > 0 for cell in cells.values())
    assert cells["much"]["kl"] > 0
    assert cells["much, monitored"]["watching"] > 0  # on the wall's clock, the others in CPU time
    with pytest.raises(UsageError, match=f"pass at most {(LENGTH - 1) // 4}"):  # each pass has its own length
        speed.model_level(model, {}, torch.zeros(1, LENGTH, dtype=torch.long), LENGTH, None, False)
    record = json.loads(seed.read_text())
    plan = speed.plan_of_record(record, model)
    assert [choice.label for layer in plan.layers for choice in layer.choices] == record["picks"]
    assert plan.verified is not None
    assert plan.verified.sentence == record["sentence"]
    assert speed.plan_of_record({**record, "met": False}, model).verified is None
    with pytest.raises(UsageError, match="without bases"):
        speed.plan_of_record({**record, "picks": ["r16"] * len(record["picks"])}, model)
    with pytest.raises(UsageError, match="a multiple of the model's 4 layers"):
        speed.plan_of_record({**record, "picks": ["bf16"] * 7}, model)


def test_recorded_plans_have_the_mean_keys_that_int8_takes_off(text: list[Path]) -> None:
    model, encode = study.load(str(demo_model_path("llama")), "float32", "cpu", None, None)
    settings = {"lengths": [128], "dtype": "float32", "families": ["int8"], "windows": []}
    record = {"settings": settings, "picks": ["int8"] * 8, "budget": 1e-3, "seed": 0}
    tokens = torch.tensor([list(encode(text[1].read_text())[:128])])
    means = speed.mean_keys(model, tokens)
    plan = speed.plan_of_record(record, model, means)
    assert plan.tensors
    attach.attach(model, plan, unverified=True)
    for index, module in attention_modules(model, "llama"):
        program = fit.program_of(module)
        assert program is not None
        wanted = means[index].key_mean
        assert wanted is not None
        assert program.tensors.key_mean is not None
        torch.testing.assert_close(program.tensors.key_mean, wanted)
    assert speed.plan_of_record(record, model).tensors == ""
