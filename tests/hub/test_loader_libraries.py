"""Libraries above Transformers with the kernel's name: sentence-transformers, and TRL without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from adaattn_hf.eval.demo import demo_model_path

from .models import FLASH, SIZES

pytest.importorskip("kernels", reason="the package kernels is not installed; `make hub-test` has it")
tf = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [f"word{i}" for i in range(50)]
SENTENCES = [" ".join(WORDS[i % 7 : i % 7 + n]) for i, n in enumerate((1, 30, 3, 12, 2, 5))]


@pytest.fixture(autouse=True)
def local(repositories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader takes the repository built here instead of asking the Hub."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{FLASH}={repositories / 'flash-adaattn'}")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Whole words by number, with the special tokens of an encoder."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@pytest.fixture(scope="module")
def encoder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer BERT, saved like a checkpoint."""
    directory = tmp_path_factory.mktemp("encoder")
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=54, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    tf.BertModel(config).save_pretrained(directory)
    return directory


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


def embedder(path: Path, implementation: str) -> Any:
    return sentence_transformers.SentenceTransformer(
        str(path), model_kwargs={"attn_implementation": implementation, "dtype": torch.float32}, device="cpu"
    )


def test_sentence_transformers_computes_no_padding_by_itself(encoder: Path) -> None:
    stock, ours = embedder(encoder, "eager"), embedder(encoder, FLASH)
    tokens: list[int] = []
    ours[0].auto_model.encoder.layer[0].register_forward_pre_hook(
        lambda module, inputs: tokens.append(inputs[0].shape[:2].numel())
    )
    found, right = (model.encode(SENTENCES, convert_to_tensor=True) for model in (ours, stock))
    torch.testing.assert_close(found, right, atol=2e-6, rtol=0)
    lengths = [len(sentence.split()) + 2 for sentence in SENTENCES]
    assert tokens == [sum(lengths)]  # a padded batch has len(SENTENCES) * max(lengths)


def test_trl_trains_without_padding(tokenizer: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.randint(4, 54, (length,), generator=generator).tolist()}
        for length in torch.randint(3, 20, (24,), generator=generator).tolist()
    ]

    def losses(implementation: str, **changes: Any) -> list[float]:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SIZES), attn_implementation=implementation)
        settings = trl.SFTConfig(
            output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=4, logging_steps=1, learning_rate=1e-2,
            report_to="none", save_strategy="no", bf16=False, use_cpu=True, max_length=None, **changes,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=model,
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    right = losses("eager")
    assert len(right) == 5
    assert losses(FLASH, padding_free=True) == pytest.approx(right, abs=1e-4)
    assert right[-1] < right[0]
