"""The ablation and the budget report on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from adaattn_hf.calibration.calibrate import CalibrationSettings
from adaattn_hf.cli.ablate import ARMS, ablate_model, page, terminal_table
from adaattn_hf.cli.main import app
from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from adaattn_hf.policy.prices import Price, PriceTable
from studies.budget.report import write_page

from ..support.interrupting import interrupted

LENGTH = 160


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.08,
    )
    config._attn_implementation = "adaattn"
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    letters = np.random.default_rng(0).integers(97, 123, 6000)
    path.write_text(
        "\n".join("".join(map(chr, letters[i : i + 60])) for i in range(0, 6000, 60)), encoding="utf-8"
    )
    return [path]


def encode(text: str) -> list[int]:
    return [ord(character) % 128 for character in text]


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
    assert terminal_table(result).row_count == len(result["rows"])


def test_the_command_writes_figures_and_their_page(tmp_path: Path, text: list[Path]) -> None:
    output = tmp_path / "made" / "ablate.json"
    words = f"--length {LENGTH} --held-out 2 --families bf16 --budgets 1% --threads {torch.get_num_threads()}"
    done = CliRunner().invoke(
        app,
        [
            "ablate",
            str(demo_model_path("llama")),
            "--data",
            str(text[0]),
            "--output",
            str(output),
            *words.split(),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    result = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(done.stdout) == result
    assert "the budget binds the predicted KL" in " ".join(done.stderr.split())
    assert [row["arm"] for row in result["rows"]] == [*ARMS, "uniform"]
    assert result["provenance"]["versions"]["torch"]
    found = output.with_suffix(".md").read_text(encoding="utf-8")
    assert found == page(result)
    assert "* 1 %: together" in found
    assert str(tmp_path) not in found + json.dumps(result)


def test_ctrl_c_keeps_the_finished_rows_and_says_so(tmp_path: Path) -> None:
    output, text = tmp_path / "ablation.json", tmp_path / "text.txt"
    text.write_text("\n\n".join(calibration_pages()), encoding="utf-8")
    words = f"--length 512 --sequences 1 --held-out 12 --families window,bf16 --threads 1 --output {output}"
    arguments = ["ablate", str(demo_model_path("llama")), "--data", str(text), *words.split()]
    partial = tmp_path / "ablation.json.partial"
    done = interrupted(arguments, partial)
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
def test_wrong_arguments_end_with_code_2(text: list[Path], more: tuple[str, str], words: str) -> None:
    done = CliRunner().invoke(app, ["ablate", str(demo_model_path("llama")), "--data", str(text[0]), *more])
    assert done.exit_code == 2
    assert words in done.stderr


def test_the_committed_report_is_the_one_of_its_json(tmp_path: Path, checkout: Path) -> None:
    source = checkout / "docs" / "results" / "budget.json"
    write_page(source, tmp_path / "budget.md")
    text = (tmp_path / "budget.md").read_text(encoding="utf-8")
    assert text == (checkout / "docs" / "results" / "budget.md").read_text(encoding="utf-8")
    study = json.loads(source.read_text(encoding="utf-8"))
    strict = [seed for seed in study["seeds"] if seed["budget"] < 2e-3]
    assert len({seed["seed"] for seed in strict}) == len(strict) >= 20
    assert sum(seed["met"] for seed in strict) >= 19
