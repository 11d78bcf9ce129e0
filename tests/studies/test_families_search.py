"""The study of the search on other families: what it writes, and what it says where a calibration fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies import families_search


def test_a_failed_calibration_is_told_with_its_words(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"ended with [1-9]\d*: .*calibration\.txt"):
        families_search.searched(tmp_path, "0.1%", 256, 1)


def test_the_page_says_shape_seconds_and_proof() -> None:
    proof = {"documents": 8, "delta_nll": 1e-4, "upper": 2e-4, "confidence": 0.95}
    row = {
        "family": "gemma3_text", "shape": [2, 1, 256], "layers": 6, "window": 512, "seconds": 61.4, "budget": 1e-3,
        "dtype": "float32", "lengths": [2048], "verified": proof, "approximate": 4, "heads": 6,
        "attention_times_exact": 2.5, "whole_forward": [],
    }  # fmt: skip
    made = {"cpu": "a processor", "threads": 2, "python": "3.x", "commit": None}
    made["versions"] = {"torch": "2", "transformers": "5"}
    page = families_search.page({"models": [row], "threads": 2, "provenance": made})
    assert "2 query heads and 1 key/value heads of 256" in page
    assert "decided after 61 s" in page
    assert "4 of 6 key/value heads are approximate" in page
    assert "at most 2.00e-04" in page
