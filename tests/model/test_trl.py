"""TRL's SFTTrainer, with padded batches and with packed ones."""

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from adaattn_hf.eval.demo import calibration_pages, demo_model_path

from ..support.warm import AS_A_MODULE, WarmInterpreter
from .test_training import apart, arguments, examples, model_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

# what TRL and the libraries under it warn about is theirs
pytestmark = pytest.mark.filterwarnings("ignore")


def trainer_of(family: str, implementation: str, directory: Path, **changes: Any) -> Any:
    rows = [{"input_ids": [t for t in e["input_ids"] if t]} for e in examples(48)]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = arguments(directory, max_steps=10).to_dict() | dict(bf16=False, logging_steps=1) | changes
    return trl.SFTTrainer(
        model=model_of(family, implementation), args=trl.SFTConfig(**settings),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tf.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t2"
        ),
    )  # fmt: skip


def losses(trainer: Any) -> list[float]:
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == 10
    return found


PACKED: dict[str, Any] = dict(packing=True, packing_strategy="bfd", max_length=40, per_device_train_batch_size=2)


def test_padded_batches_follow_stock_attention(tmp_path: Path) -> None:
    ours = losses(trainer_of("llama", "adaattn", tmp_path))
    assert max(apart(losses(trainer_of("llama", "eager", tmp_path)), ours)) <= 1e-4


def test_packed_batches_follow_stock_attention_over_the_same_documents(tmp_path: Path) -> None:
    """Checkpointed, and so without a cache, where stock attention reads the borders from the positions, too."""
    changes = PACKED | dict(gradient_checkpointing=True)
    curves = [losses(trainer_of("llama", name, tmp_path, **changes)) for name in ("eager", "adaattn")]
    assert max(apart(*curves)) <= 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_loss_of_a_packed_batch_is_that_of_its_documents(family: str, use_cache: bool, tmp_path: Path) -> None:
    trainer = trainer_of(family, "adaattn", tmp_path, **PACKED)
    stock, ours = model_of(family, "eager").eval(), trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    assert len(starts) > 3, "nothing was packed"
    total, scored = 0.0, 0
    with torch.no_grad():
        for start, stop in itertools.pairwise(starts):
            ids = batch["input_ids"][:, start:stop]
            if stop - start > 1:
                total += float(stock(input_ids=ids, labels=ids).loss) * (stop - start - 1)
                scored += stop - start - 1
        found = float(ours(**{k: v for k, v in batch.items() if k != "seq_idx"}, use_cache=use_cache).loss)
    assert found == pytest.approx(total / scored, abs=1e-5)


@pytest.mark.slow
def test_the_command_line_of_trl_trains_with_the_registered_name(tmp_path: Path, interpreter: WarmInterpreter) -> None:
    """`adaattn run -m trl.scripts.sft`, a step of the packaged model on a file of its pages."""
    rows = [json.dumps({"text": page[:300]}) for page in calibration_pages()[:8]]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    words = {
        "model_name_or_path": str(demo_model_path("llama")), "dataset_name": str(tmp_path / "data"),
        "attn_implementation": "adaattn", "max_steps": "1", "max_length": "64", "report_to": "none",
        "use_cpu": "true", "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    options = [part for name, word in words.items() for part in (f"--{name}", word)]
    done = interpreter.run(AS_A_MODULE, tmp_path, "run", "-m", "trl.scripts.sft", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "model.safetensors").is_file()
