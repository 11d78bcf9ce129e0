"""The study of caches at tiny sizes: every cache that runs here has its bytes, its speed and its loss on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaattn_hf.eval.demo import demo_model_path, pages_path
from studies.cache import ARMS, app


def test_the_study_writes_bytes_speed_and_loss_of_every_cache(tmp_path: Path) -> None:
    sizes = "--lengths 64,128 --batches 1,2 --rounds 2 --steps 1 --windows 3 --window 96"
    options = f"{sizes} --shape tiny --skip quanto,hqq"
    done = CliRunner().invoke(
        app,
        [
            *("--model", str(demo_model_path("llama")), "--text", str(pages_path("heldout"))),
            *("--write", str(tmp_path), *options.split()),
        ],
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "cache.json").read_text())
    ran = {arm.name for arm in ARMS} - set(found["absent"])
    assert {"DynamicCache", "StaticCache", "AdaAttnCache model", "AdaAttnCache int8"} <= ran
    rows, shaped = found["speed"].values()
    assert {row["cache"] for row in shaped} >= {"DynamicCache", "AdaAttnCache k8v4"}
    assert {(row["cache"], row["batch"], row["length"]) for row in rows} == {
        (name, batch, length) for name in ran for batch in (1, 2) for length in (64, 128)
    }
    size = {
        row["cache"]: row["bytes_per_token"] for row in rows if row["length"] == 128 and row["batch"] == 1
    }
    assert size["AdaAttnCache int8"] < 0.75 * size["DynamicCache"]
    loss = {row["cache"]: row for row in found["loss"]}
    assert loss["AdaAttnCache model"]["delta_nll"] == pytest.approx(0, abs=1e-5)
    assert 0 < abs(loss["AdaAttnCache int8"]["delta_nll"]) < 0.01
    words = (tmp_path / "cache.md").read_text()
    assert all(f"| {name} |" in words for name in ran)
