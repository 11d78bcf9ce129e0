"""The ablation on a tiny model, and its committed page."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from adaattn_hf.calibration.calibrate import CalibrationSettings
from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.policy.prices import Price, PriceTable
from studies.budget.ablate import ARMS, ablate_model, main, page

from ..support.interrupting import interrupted
from ..support.letters import encode, lettered_llama, random_letters
from ..support.source_tree import ROOT

LENGTH = 160
COMMAND = (
    *(sys.executable, "-P", "-c"),
    f"import sys; sys.path.append({str(ROOT)!r}); from studies.budget.ablate import main; main()",
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return lettered_llama(layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [random_letters(tmp_path_factory.mktemp("text") / "book.txt")]


def test_ablation_has_every_arm_and_the_combination_is_cheapest(
    model: LlamaForCausalLM, text: list[Path]
) -> None:
    settings = CalibrationSettings(
        lengths=(LENGTH,), sequences=2, rows=64, held_out=3, tries=1, haystacks=0, windows=(32,)
    )
    settings = replace(settings, families=("window", "bf16", "rank"))
    costs = {"exact": 1.0, "bf16": 0.5, "w32+16": 0.3, "w32+16 bf16": 0.2, "r16": 0.9}
    row = {label: Price(0.0, cost) for label, cost in costs.items()}
    prices = PriceTable("a table", {}, {"prefill": {LENGTH: row}, "decode": {LENGTH: row}})
    result = ablate_model(model, encode, text, [1e-3, 1.0], settings, prices=prices)
    by_arm = {(r["arm"], r.get("budget")): r for r in result["rows"] if r["arm"] != "uniform"}
    assert {arm for arm, _ in by_arm} == set(ARMS)
    for budget in (1e-3, 1.0):
        assert all(by_arm["combined", budget]["ratio"] >= by_arm[arm, budget]["ratio"] - 1e-9 for arm in ARMS)
        assert all(by_arm[arm, budget]["predicted"] <= budget for arm in ARMS)
    assert by_arm["combined", 1.0]["ratio"] == pytest.approx(5.0)
    assert {r["choice"] for r in result["rows"] if r["arm"] == "uniform"} == set(costs) - {"exact"}


def run(*words: object) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_the_command_writes_figures_and_their_page(tmp_path: Path, text: list[Path]) -> None:
    output = tmp_path / "made" / "ablate.json"
    words = f"--length {LENGTH} --held-out 2 --families bf16 --budgets 1% --threads {torch.get_num_threads()}"
    assert run(demo_model_path("llama"), "--data", text[0], "--output", output, *words.split()) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert [row["arm"] for row in result["rows"]] == [*ARMS, "uniform"]
    assert result["provenance"]["versions"]["torch"]
    found = output.with_suffix(".md").read_text(encoding="utf-8")
    assert found == page(result)
    assert "the budget binds the predicted KL" in found
    assert "* 1 %: together" in found
    assert str(tmp_path) not in found + json.dumps(result)


def test_a_masked_model_is_scored_at_masked_places(tmp_path: Path) -> None:
    output = tmp_path / "ablation.json"
    words = f"--length 128 --sequences 1 --held-out 2 --budgets 1% --output {output}"
    assert run(demo_model_path("bert"), "--data", pages_path("calibration"), *words.split()) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert {row["choice"] for row in rows if row["arm"] == "uniform"} >= {"w32+16 bf16", "int8", "r16"}
    assert all(row["kl"] >= 0 and row["ratio"] > 0 for row in rows)


def test_ctrl_c_keeps_the_finished_rows_and_says_so(tmp_path: Path) -> None:
    output, partial = tmp_path / "ablation.json", tmp_path / "ablation.json.partial"
    words = f"--length 512 --sequences 1 --held-out 12 --families window,bf16 --threads 1 --output {output}"
    arguments = [str(demo_model_path("llama")), "--data", str(pages_path("calibration")), *words.split()]
    done = interrupted(arguments, partial, COMMAND)
    assert done.returncode == 130, done.stderr
    assert f"interrupted: finished rows are kept in {partial}" in done.stderr
    rows = json.loads(partial.read_text(encoding="utf-8"))["rows"]
    assert rows[0]["arm"] == "rank"
    assert rows[0]["kl"] >= 0
    assert not output.exists()


def test_the_committed_ablation_is_the_page_of_its_json(checkout: Path) -> None:
    results = checkout / "docs" / "results"
    result = json.loads((results / "ablate.json").read_text(encoding="utf-8"))
    assert (results / "ablate.md").read_text(encoding="utf-8") == page(result)
    for budget in {row["budget"] for row in result["rows"] if "budget" in row}:
        ratio = {row["arm"]: row["ratio"] for row in result["rows"] if row.get("budget") == budget}
        assert ratio["combined"] > max(ratio[arm] for arm in ARMS[:-1])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--data", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--families", "windows"), "Did you mean 'window'"),
        (("--length", "long"), "lengths is 'long'"),
        (("--dtype", "float33"), "dtype: got 'float33'"),
        (("--output", f"{__file__}/x.json"), "cannot be made"),
        (("--budgets", "0.1%,lots"), "budget is 'lots'"),
    ],
)
def test_wrong_arguments_end_with_code_2(
    text: list[Path], more: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(demo_model_path("llama"), "--data", text[0], *more) == 2
    assert words in capsys.readouterr().err
