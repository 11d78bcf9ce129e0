"""The page of caches under a budget, from plans as calibration writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from adaattn_hf.errors import UsageError
from studies import cache_plans

VERDICT: dict[str, Any] = {
    "passed": True, "delta_nll": 2e-4, "upper": 6e-4, "confidence": 0.975, "tries": 2, "documents": 9, "tokens": 900,
    "kl": 1e-4, "kl_p999": 0.01, "top1": 0.99, "retrieval_stock": 0.5, "retrieval_plan": 0.25, "activation": 0.5,
    "activation_keys": 0.5, "predicted_kl": 1e-4, "sentence": "passed",
}  # fmt: skip
CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def written(directory: Path, cache: dict[str, Any] | None) -> Path:
    plan = {
        "format": 2, "model_type": "llama", "weight_hash": "model:0",
        "configuration": {"head_dim": 8}, "dtype": "float32", "adaattn": "0", "torch": "2",
        "transformers": "5", "budget": 1e-3, "seed": 0, "data_fingerprint": "", "units": [], "verified": VERDICT,
        "protocol": {"machine": "a device", "cache": cache}, "lengths": [64], "tensors": "", "layers": [],
        "attention_layers": [],
    }  # fmt: skip
    directory.mkdir()
    (directory / "adaattn_plan.json").write_text(json.dumps(plan))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_a_cache_is_set_beside_one_of_16_bits(tmp_path: Path) -> None:
    cache = {"share": 0.125, "stored": "int8", "streaming": True, "verified": VERDICT}
    cache_plans.main([str(tmp_path), f"a model={written(tmp_path / 'plan', cache)}"])
    (kept,) = json.loads((tmp_path / "cache_plans.json").read_text())
    assert (kept["bytes_per_token"], kept["dynamic"], kept["smaller"]) == (32, 128, 4)
    row = (tmp_path / "cache_plans.md").read_text().splitlines()[-1]
    assert "| 4.00 | +2.00e-04 | +6.00e-04 | 97.50% | 50%, 25% | a device |" in row


@pytest.mark.parametrize(
    "cache", [None, {"stored": "int8", "streaming": True, "verified": {**VERDICT, "passed": False}}]
)
def test_a_plan_without_a_proved_cache_is_no_row(tmp_path: Path, cache: dict[str, Any] | None) -> None:
    with pytest.raises(UsageError, match="has no cache that was proved"):
        cache_plans.record("a model", written(tmp_path / "plan", cache))
