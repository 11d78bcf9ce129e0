"""The study of real models: a file a row, nothing measured twice, and a page of what is there."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages
from adaattn_hf.patches.plans import attach
from studies import real_models, real_page

from ..support.calibration import price_table

LENGTH = 192
SETTINGS: dict[str, Any] = {
    "sequences": 1, "rows": 32, "labels": 1, "joint": 2, "held_out": 3, "haystacks": 0, "windows": (64,),
    "families": ("window",),
}  # fmt: skip


PRICES = price_table(LENGTH, {"exact": 1.0, "w64+16": 0.5})


@pytest.fixture
def study(tmp_path: Path) -> real_models.Study:
    pages = {"calibration": calibration_pages()[:10], "proof": heldout_pages()[:12], "third": heldout_pages()[12:16]}
    for kind, own in pages.items():
        (tmp_path / "texts" / kind).mkdir(parents=True)
        (tmp_path / "texts" / kind / f"{kind}.txt").write_text("\n\n".join(own), encoding="utf-8")
    return real_models.opened(str(demo_model_path("llama")), tmp_path / "texts", tmp_path / "out", "cpu", 2, PRICES)


def test_rows_are_measured_once(study: real_models.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = partial(real_models.rows_of, study, LENGTH, ["0.000001%", "60%"], 0, **SETTINGS)
    files = rows()
    none, much = (json.loads(file.read_text()) for file in files)
    assert (none["met"], much["met"]) == (False, True)
    assert none["third"]["upper"] == 0.0 < much["third"]["kl"]
    assert none["by_prices"] == 1.0 < much["by_prices"]
    assert much["verdict"]["upper"] <= much["nats"]
    assert much["seconds"] > much["measuring"] > 0.0
    assert much["predicted_gb"] > 0.0
    assert much["priced"] == PRICES.machine
    assert much["sources"]["third"] == ["third.txt"]
    assert attach.plan_of(study.model) is None
    with monkeypatch.context() as other:
        other.setattr(real_models, "measure", None)  # nothing is measured again
        assert rows() == files
        files[1].unlink()
        with pytest.raises(TypeError, match="not callable"):
            rows()
    real_models._write(files[1], much)

    speed = real_models.speed_of(study, LENGTH, ["0.000001% 0"])
    assert set(json.loads(speed.read_text())["passes"]) == {"stock", "exact", "prepared"}
    real_models.speed_of(study, LENGTH, ["0.000001% 0", "60% 0"])
    assert set(json.loads(speed.read_text())["passes"]) == {"stock", "exact", "prepared", "60% 0"}
    real_page.write_page(tmp_path / "out", tmp_path)
    page = (tmp_path / "real_models.md").read_text()
    assert "| model-llama | 192 | 60% | 1 of 1 |" in page
    assert "| model-llama | 192 | 0.000001% | 0 of 1 | – |" in page
    assert "| model-llama | 192 | plan 60% |" in page
    assert json.loads((tmp_path / "real_models.json").read_text())["cpu"]["rows"][1] == much


def test_attention_is_timed_layer_by_layer(study: real_models.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's stopwatch is replaced by one that takes a second for stock and half a second for others."""

    def stopwatch(calls: dict[str, Any], host: bool) -> dict[str, list[float]]:
        outs = {name: call() for name, call in calls.items()}
        torch.testing.assert_close(outs["stock sdpa"][0], outs["exact"], atol=1e-2, rtol=1e-2)
        return {name: [1.0 if name == "stock sdpa" else 0.5] * 3 for name in calls}

    monkeypatch.setattr("studies.budget.on_device", stopwatch)
    found = real_models.attention(study.model, torch.ones(1, 8, dtype=torch.long), {})
    assert found == {"stock sdpa": 4.0, "exact": 2.0}


def test_devices_share_no_table_and_random_weights_have_no_losses(study: real_models.Study, tmp_path: Path) -> None:
    random = real_models.opened("tiny", tmp_path / "texts", tmp_path / "out", "cpu", 2, PRICES)
    assert max(random.encode("text")) < random.model.config.vocab_size
    file = real_models.rows_of(random, LENGTH, ["60%"], 0, **SETTINGS)[0]
    row = json.loads(file.read_text())
    assert "third" not in row
    other = tmp_path / "out" / "NVIDIA-H100" / "rows" / file.name
    row["provenance"]["device"] = "NVIDIA H100"
    real_models._write(other, row)
    real_page.write_page(tmp_path / "out", tmp_path)
    page = (tmp_path / "real_models.md").read_text()
    assert page.count("### Calibration with random weights") == 2
    assert "## NVIDIA H100" in page
    assert "### Loss" not in page
