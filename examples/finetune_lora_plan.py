"""Fine-tune with LoRA on packed documents, under a plan and beside exact attention.

    python examples/finetune_lora_plan.py [MODEL --plan PLAN] [--steps 30] [--context 512] [--output lora]

Without MODEL the tiny LLaMA-class model of the package is used, offline, and `adaattn calibrate` makes its plan first.
It learns the reference of the Python language, which comes with Python. The adapter is saved with the plan beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import adaattn_hf
from adaattn_hf.eval.demo import demo_model_path
from adaattn_hf.eval.provenance import provenance


def fine_tune(model: Any, train: list[Any], held_out: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Trains adapters; returns the loss of every step, and that of held-out text before and after."""
    arguments = TrainingArguments(
        output_dir=options.output, max_steps=options.steps, logging_steps=1, learning_rate=4e-3, seed=0,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    packed = DataCollatorWithFlattening()  # documents in one row, and none of them sees another
    trainer = Trainer(model, arguments, data_collator=packed, train_dataset=train, eval_dataset=held_out)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    steps = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": steps, "before": before, "after": trainer.evaluate()["eval_loss"]}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the loss of every step of both runs."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6.4, 3.2), layout="constrained")).subplots()
    for name, one in found.items():
        label = f"{name}: held-out {one['before']:.3f}, then {one['after']:.3f}"
        axes.plot(one["steps"], "-" if name == "exact" else "--", label=label)
    axes.set(xlabel="step", ylabel="training loss, nats/token")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Fine-tune twice, save the adapter with its plan, and load both again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(demo_model_path("llama")))
    parser.add_argument("--plan", help="what `adaattn calibrate` wrote for MODEL")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--output", type=Path, default=Path("lora"))
    parser.add_argument("--json", type=Path, help="also write the losses to this file")
    parser.add_argument("--picture", type=Path, help="also draw them, with matplotlib")
    options = parser.parse_args()
    if options.plan is None:
        options.plan = str(options.output / "plan")
        words = [
            "-m",
            "adaattn_hf",
            "calibrate",
            "--lengths",
            str(options.context),
            "--families",
            "window,bf16",
            "--output-dir",
            options.plan,
            "--quiet",
        ]
        subprocess.run([sys.executable, *words], check=True)  # noqa: S603

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [tokenizer(text, truncation=True, max_length=options.context) for text in topics.values()]
    found: dict[str, Any] = {}
    for name in ("exact", "plan"):
        base = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="adaattn", use_cache=False)
        if name == "plan":
            adaattn_hf.load_plan(base, options.plan)
        torch.manual_seed(0)  # both adapters begin alike
        model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        found[name] = fine_tune(model, texts[4:], texts[:4], options)
        print(f"{name}: held-out loss {found[name]['before']:.4f} before, {found[name]['after']:.4f} after")

    model.save_pretrained(options.output)
    adaattn_hf.Plan.from_pretrained(options.plan).save_pretrained(options.output)
    base = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="adaattn", use_cache=False)
    again = PeftModel.from_pretrained(base, options.output).eval()
    adaattn_hf.load_plan(again, options.output)
    ids = torch.tensor([texts[0]["input_ids"]])
    with torch.no_grad():
        print("loaded again, the same:", torch.allclose(again(ids).logits, model.eval()(ids).logits, atol=1e-4))
    if options.json is not None:
        about = {"provenance": provenance(again.device), "steps": options.steps, "context": options.context}
        options.json.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
