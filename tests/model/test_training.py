"""Fine-tuning with Trainer and the libraries around it, step by step against stock attention."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import adaattn_hf

from ..support.models import assert_same, config_of, fresh_pair, padding, tokens
from ..support.plans import lora

FAMILIES = ("gpt2", "bert", "llama")
HEADS: dict[str, Any] = {"gpt2": tf.GPT2LMHeadModel, "bert": tf.BertForMaskedLM, "llama": tf.LlamaForCausalLM}
LENGTH = 16


def examples(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Sentences of different lengths in which each token depends on the one before, padded to the right."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(6, LENGTH + 1, (1,), generator=generator))
        ids = torch.randint(3, 64, (length,), generator=generator)
        ids[1::2] = (ids[::2][: len(ids[1::2])] * 7) % 61 + 3
        missing = LENGTH - length
        row = dict(input_ids=ids.tolist(), attention_mask=[1] * length, labels=ids.tolist())
        found.append({name: kept + [-100 if name == "labels" else 0] * missing for name, kept in row.items()})
    return found


def arguments(directory: Path, **changes: Any) -> tf.TrainingArguments:
    settings: dict[str, Any] = dict(
        output_dir=str(directory), per_device_train_batch_size=4, learning_rate=3e-3, max_steps=30, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, seed=0, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return tf.TrainingArguments(**{**settings, **changes})


def model_of(family: str, implementation: str) -> Any:
    torch.manual_seed(1)
    return HEADS[family]._from_config(config_of(family), attn_implementation=implementation)


def losses(family: str, implementation: str, directory: Path, **changes: Any) -> list[float]:
    trainer = tf.Trainer(
        model=model_of(family, implementation), args=arguments(directory, **changes), train_dataset=examples(64)
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def apart(first: list[float], second: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps_follow_eager_in_fp32(family: str, tmp_path: Path) -> None:
    stock = losses(family, "eager", tmp_path, max_steps=50)
    ours = losses(family, "adaattn", tmp_path, max_steps=50)
    assert len(stock) == 50
    assert stock[-1] < stock[0] - 0.05, "nothing was learnt, so nothing was compared"
    assert max(apart(stock, ours)) <= 1e-4


def test_bf16_stays_as_near_to_eager_as_stock_sdpa(tmp_path: Path) -> None:
    eager, sdpa, ours = (
        losses("llama", name, tmp_path, bf16=True, max_steps=20) for name in ("eager", "sdpa", "adaattn")
    )
    # over the curve: its largest distance is one draw of a walk that rounding started
    assert sum(apart(eager, ours)) <= 2 * sum(apart(eager, sdpa)) + 1e-4 * len(eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_gives_gradients_like_stock(family: str, dtype: torch.dtype) -> None:
    ids, mask = tokens(), padding("right")
    found: dict[str, dict[str, Tensor]] = {}
    for name in ("eager", "sdpa", "adaattn"):
        model = model_of(family, name).eval()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        found[name] = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    exact = model_of(family, "eager").eval()
    exact(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    total = dict.fromkeys(found, 0.0)
    for key, parameter in exact.named_parameters():
        if parameter.grad is not None:
            for name, grads in found.items():
                assert torch.isfinite(grads[key]).all()
                total[name] += float((grads[key] - parameter.grad).square().sum())
    assert total["adaattn"] <= 4 * max(total["sdpa"], total["eager"]) + 1e-12


def test_dropout_of_attention_weights_has_the_right_statistics() -> None:
    """With equal weights and values of one, an output is the share of weights kept over the share expected."""
    from adaattn_hf.patches.call.interface import attention_function

    module = torch.nn.Module()
    module.train()
    query = torch.zeros(8, 4, 64, 16)
    value = torch.ones(8, 4, 64, 16)
    rate = 0.25
    out, _ = attention_function()(module, query, query, value, None, dropout=rate, is_causal=False)
    kept = out[..., 0].flatten()
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.01)
    # variance of a mean of 64 Bernoulli variables, scaled by 1 / (1 - rate)
    assert float(kept.var()) == pytest.approx(rate / (1 - rate) / 64, rel=0.15)
    again, _ = attention_function()(module, query, query, value, None, dropout=rate, is_causal=False)
    assert not torch.equal(out, again)


def test_resuming_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(max_steps=8, save_strategy="steps", save_steps=4, lr_scheduler_type="constant")
    whole = losses("llama", "adaattn", tmp_path / "whole", **settings)
    first = tf.Trainer(
        model=model_of("llama", "adaattn"), args=arguments(tmp_path / "parts", **settings), train_dataset=examples(64)
    )
    first.train()
    second = tf.Trainer(
        model=model_of("llama", "adaattn"), args=arguments(tmp_path / "parts", **settings), train_dataset=examples(64)
    )
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    resumed = [entry["loss"] for entry in second.state.log_history if "loss" in entry]
    assert resumed == whole
    for name, parameter in first.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name
    written = tf.LlamaConfig.from_pretrained(tmp_path / "parts" / "checkpoint-8").to_dict()
    assert "adaattn" not in str(written)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_batches_train_like_separate_documents(family: str, tmp_path: Path) -> None:
    documents = [
        {"input_ids": [t for t, real in zip(e["input_ids"], e["attention_mask"], strict=True) if real]}
        for e in examples(4)
    ]
    collator = tf.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator([dict(d) for d in documents])
    assert batch["input_ids"].shape[0] == 1
    ours, stock = model_of(family, "adaattn"), model_of(family, "eager")
    scored = 0
    total = torch.zeros(())
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        count = ids.shape[1] - 1
        total = total + stock.eval()(input_ids=ids, labels=ids).loss * count
        scored += count
    (total / scored).backward()
    loss = ours.eval()(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx((total / scored).item(), abs=1e-5)
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            assert_same(parameter.grad, ours.get_parameter(name).grad, rtol=1e-5)
    # one row a document: both models read the same tokens, stock without packing
    losses = [
        tf.Trainer(
            model=model.train(),
            args=arguments(tmp_path / name, max_steps=3, remove_unused_columns=False, per_device_train_batch_size=1),
            train_dataset=documents * 4,
            data_collator=collator,
        )
        .train()
        .training_loss
        for name, model in (("ours", ours), ("stock", stock))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("placed", ["device_map", "device_map with disk", "cpu_offload", "disk_offload"])
def test_accelerate_hooks_leave_the_outputs_alone(placed: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    _, ours = fresh_pair("llama")
    ids, mask = tokens(), padding("left")
    with torch.no_grad():
        expected = ours(input_ids=ids, attention_mask=mask).logits
    if placed == "device_map":
        ours.save_pretrained(tmp_path)
        hooked = tf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="adaattn", device_map={"": "cpu"})
    elif placed == "device_map with disk":
        ours.save_pretrained(tmp_path)
        parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
        hooked = tf.LlamaForCausalLM.from_pretrained(
            tmp_path,
            attn_implementation="adaattn",
            device_map={**parts, "model.rotary_emb": "cpu", "lm_head": "cpu"},
            offload_folder=str(tmp_path / "offloaded"),
        )
        assert next(hooked.model.layers[1].parameters()).is_meta, "nothing lies on the disk"
    elif placed == "cpu_offload":
        hooked = accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    else:
        hooked = accelerate.disk_offload(ours, str(tmp_path), execution_device=torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(expected, hooked(input_ids=ids, attention_mask=mask).logits)


# PEFT asks for the property by its old name
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("prepared", [False, True])
def test_lora_adapters_train_like_under_eager(prepared: bool) -> None:
    stock, ours = fresh_pair("llama")
    grads = []
    for model in (stock, ours):
        adapted = lora(model, init_lora_weights=False)
        if prepared and model is ours:
            adaattn_hf.prepare(adapted)
        ids, mask = tokens(), padding("right")
        # what rows of padding compute differs between implementations, and nothing may be learnt from it
        adapted(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        grads.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert len(grads[0]) == 2 * 2 * 2
    assert all("lora" in name for name in grads[0])
    for name, grad in grads[0].items():
        assert_same(grad, grads[1][name], rtol=1e-5)
    assert adaattn_hf.unpad_calls(ours) == ({"unpadded": 1} if prepared else {})


@pytest.mark.slow
def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    """DDP and FSDP, torch's and accelerate's, each process with half a batch; tensor parallelism, stages with plans."""
    script = Path(__file__).parent.parent / "support" / "two_processes.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    ways = ["ddp", "fsdp", "fsdp-checkpointing"]
    if importlib.util.find_spec("accelerate"):
        ways += ["accelerate", "accelerate-fsdp"]
    assert done.stdout.split() == [*ways, "fsdp-plan", "tp", "stages"]


def test_training_libraries_are_tested_where_they_belong() -> None:
    """The extras of development name them, so that a skip above is never silent in the project's own environment."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("not the development environment")
    assert importlib.util.find_spec("peft")
    assert importlib.util.find_spec("accelerate")
    assert importlib.util.find_spec("trl")


def test_wide_weights_train_without_a_nan() -> None:
    """Scores far apart and rows of padding: the gradients are finite in every dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        ours = fresh_pair("llama").ours.to(dtype).train()
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    parameter.mul_(30)
        ids, mask = tokens(), padding("left")
        ours(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        for name, parameter in ours.named_parameters():
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all(), name
