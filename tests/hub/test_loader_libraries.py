"""Libraries above Transformers with the kernel's name: sentence-transformers, and TRL without padding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn_hf.eval.demo import demo_model_path

from ..support.sentences import SENTENCES, embedder, tiny_encoder, tokenizer_of_words
from .models import FLASH, SIZES

pytest.importorskip("kernels", reason="the package kernels is not installed; `make hub-test` has it")
tf = pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("local")]


def test_transformers_server_answers_with_the_kernel() -> None:
    """`transformers serve` loads models by this manager, under names that its closed list lets through."""
    manager = pytest.importorskip("transformers.cli.serving.model_manager").ModelManager
    answers = {}
    for implementation in (FLASH, "sdpa"):
        models_served = manager(attn_implementation=implementation, device="cpu")
        model, tokens = models_served.load_model_and_processor(f"{demo_model_path('llama')}@main")
        assert model.config._attn_implementation == implementation
        asked = tokens("It was a dark and", return_tensors="pt")
        answers[implementation] = model.generate(**asked, max_new_tokens=8, do_sample=False).tolist()
        models_served.shutdown()
    assert answers[FLASH] == answers["sdpa"]


def test_sentence_transformers_computes_no_padding_by_itself(tmp_path: Path) -> None:
    encoder = tiny_encoder(tmp_path)
    stock, ours = embedder(encoder, "eager"), embedder(encoder, FLASH)
    tokens: list[int] = []
    first = ours[0].auto_model.encoder.layer[0]
    first.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0].shape[:2].numel()))
    found, right = (model.encode(SENTENCES, convert_to_tensor=True) for model in (ours, stock))
    torch.testing.assert_close(found, right, atol=2e-6, rtol=0)
    lengths = [len(sentence.split()) + 2 for sentence in SENTENCES]
    assert tokens == [sum(lengths)]  # a padded batch has len(SENTENCES) * max(lengths)


def test_trl_trains_without_padding(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (24,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(4, 54, (length,), generator=generator).tolist()} for length in lengths]

    def losses(implementation: str, **changes: Any) -> list[float]:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SIZES), attn_implementation=implementation)
        settings = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2,
            report_to="none", save_strategy="no", bf16=False, use_cpu=True, max_length=None, **changes,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=model, args=settings, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer_of_words(),
        )  # fmt: skip
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    right = losses("eager")
    assert len(right) == 5
    assert losses(FLASH, padding_free=True) == pytest.approx(right, abs=1e-4)
    assert right[-1] < right[0]
