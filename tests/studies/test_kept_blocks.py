"""The oracle of kept blocks: what it keeps, and the window that loses as much."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from studies.kept_blocks import BLOCK, main, oracle, smallest_window, window_tiles


def test_the_oracle_keeps_the_first_the_diagonal_and_the_fewest_others() -> None:
    mass = torch.zeros(5, 5)
    mass[4] = torch.tensor([0.1, 0.05, 0.6, 0.15, 0.1])
    mass[:4, 0] = 1.0
    assert oracle(mass, 0.3)[4].tolist() == [True, False, True, False, True]
    assert oracle(mass, 0.06)[4].tolist() == [True, False, True, True, True]
    assert oracle(mass, 0.01)[4].tolist() == [True, True, True, True, True]
    assert oracle(mass, 0.3)[1].tolist() == [True, True, False, False, False]


def test_a_window_is_the_smallest_that_loses_no_more() -> None:
    length = 4 * BLOCK
    rows = torch.arange(length)
    weights = (rows == (rows[:, None] - 200).clamp(min=0)).float()[
        None
    ]  # every row reads the key 200 before it
    assert smallest_window(weights, 0.01) == 2 * BLOCK
    assert smallest_window(weights, 0.9) == BLOCK
    assert window_tiles(length, length) == 10
    assert (
        window_tiles(BLOCK, length) == 4 + 3 + 2
    )  # two tiles a row of blocks, and the sinks where they lie apart


def test_the_page_is_written(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(calibration_pages()), encoding="utf-8")
    model = str(demo_model_path("llama"))
    options = ["--length", "512", "--dtype", "float32", "--device", "cpu", "--write", str(tmp_path)]
    main([model, "--text", str(text), *options])
    (rows,) = json.loads((tmp_path / "kept_blocks.json").read_text())["texts"].values()
    assert all(row["windows_mass"] <= row["blocks_mass"] + 1e-6 for row in rows)
    assert rows[0]["blocks_tiles"] >= rows[-1]["blocks_tiles"] < 1.0
    assert rows[0]["blocks_kl"] <= rows[-1]["blocks_kl"]
    assert "| text |" in (tmp_path / "kept_blocks.md").read_text()
