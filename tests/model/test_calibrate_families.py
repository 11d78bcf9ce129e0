"""A search on families with windows of their own and one large key/value head: it decides, and changes something."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from adaattn_hf.calibration.calibrate import choose_and_verify
from adaattn_hf.calibration.inputs import Inputs, OutOfTime
from adaattn_hf.calibration.layers import Measurement
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.search import MOST_TRIES, SHARES
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from adaattn_hf.policy.prices import PriceTable

from ..support.calibration import open_inputs, price_table

LENGTH, OWN = 192, 48
WINDOWS = {"w16+16": 0.3, "w32+16": 0.4, "w64+16": 0.6}
SETTINGS = CalibrationSettings(
    lengths=(LENGTH,), sequences=1, rows=32, labels=1, joint=2, held_out=8,
    haystacks=0, windows=(16, 32, 64), families=("window", "bf16"),
)  # fmt: skip


def prices() -> PriceTable:
    """Windows save time everywhere they are narrower; layers with a window of their own are cheap already."""
    row = {"exact": 1.0, "bf16": 0.8} | WINDOWS | {f"{name} bf16": 0.8 * cost for name, cost in WINDOWS.items()}
    row |= {f"{label} in {OWN}": 0.5 * cost for label, cost in row.items()}
    return price_table(LENGTH, row)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "pages.txt"
    path.write_text("\n\n".join(calibration_pages()[:40]), encoding="utf-8")
    return path


def build(family: str, tokenizer: Any) -> tf.PreTrainedModel:
    kinds = ["full_attention" if place % 6 == 5 else "sliding_attention" for place in range(6)]
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "max_position_embeddings": 2048, "sliding_window": OWN, "layer_types": kinds, "initializer_range": 0.05,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True,
    }  # fmt: skip
    if family == "gemma":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
        return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**common, **heads, query_pre_attn_scalar=256))
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**common, **heads, use_sliding_window=True))


def opened(family: str, text: Path, settings: CalibrationSettings) -> Inputs:
    tokenizer: Any = tf.AutoTokenizer.from_pretrained(demo_model_path("llama"))
    torch.manual_seed(0)
    model = build(family, tokenizer)
    model.set_attn_implementation("adaattn")
    with torch.no_grad():
        for module in model.modules():  # scores far from even, so that windows cost something
            for name in ("q_proj", "k_proj", "v_proj"):
                if hasattr(module, name):
                    getattr(module, name).weight.mul_(6.0)

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])

    return open_inputs(model, encode, [text], settings)


@pytest.fixture(scope="module", params=["gemma", "qwen"])
def measurement(request: pytest.FixtureRequest, text: Path) -> Measurement:
    return measure(opened(request.param, text, SETTINGS), prices())


@pytest.mark.parametrize("budget", [1e-2, 1e-9])
def test_a_search_decides_and_its_plan_changes_something(measurement: Measurement, budget: float) -> None:
    result = choose_and_verify(measurement, replace(SETTINGS, budget=budget))
    steps = [entry for entry in result.report["history"] if "measured" in entry]
    assert len(steps) <= MOST_TRIES * (1 + len(SHARES))
    chosen = [(layer.layer, choice) for layer in result.plan.layers for choice in layer.choices]
    if budget < 1e-6:
        assert not result.met
        assert all(not choice.parts for _, choice in chosen)
        return
    assert result.met, result.sentence
    assert steps
    assert any(choice.parts for _, choice in chosen)
    for layer, choice in chosen:
        own = OWN if layer % 6 != 5 else None
        assert choice.beside_window(own) == choice, f"layer {layer}: {choice.label} changes nothing beside {own}"
    assert all(verdict["activation"] > 0.0 for verdict in result.report["verdicts"])


def test_no_plan_is_begun_once_the_time_is_over(text: Path) -> None:
    with pytest.raises(OutOfTime, match="1e-06 minutes are over"):
        measure(opened("gemma", text, replace(SETTINGS, minutes=1e-6)), prices())
    with pytest.raises(ValueError, match="minutes is 0"):
        replace(SETTINGS, minutes=0.0)
