"""Fine-tune with Trainer: one string in `from_pretrained`, the rest as always.

    python examples/finetune_trainer.py [MODEL] [--steps 20] [--context 256] [--output-dir finetuned]

Without MODEL the tiny LLaMA-class model of the package learns its own calibration pages, offline, on any device. The
checkpoint that comes out is a stock one: it loads with every attention implementation.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import adaattn_hf  # noqa: F401 - registers the name "adaattn"
from adaattn_hf.eval.demo import calibration_pages, demo_model_path, heldout_pages


def windows(tokenizer: object, pages: list[str], context: int) -> list[dict[str, torch.Tensor]]:
    """Disjoint windows of `context` tokens over the pages, each its own label."""
    encoded = tokenizer(pages, verbose=False)["input_ids"]  # type: ignore[operator]
    stream = torch.tensor([token for page in encoded for token in page])
    rows = stream[: len(stream) // context * context].view(-1, context)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Train for a few steps; print the held-out loss before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(demo_model_path("llama")))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--pages", type=int, default=4, help="held-out pages to evaluate on")
    parser.add_argument("--output-dir", default="finetuned")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, attn_implementation="adaattn")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=arguments.output_dir,
            max_steps=arguments.steps,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            learning_rate=1e-4,
            dataloader_pin_memory=torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=windows(tokenizer, calibration_pages(), arguments.context),
        eval_dataset=windows(tokenizer, heldout_pages()[: arguments.pages], arguments.context),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(arguments.output_dir)
    print(f"held-out loss: {before:.4f} before, {after:.4f} after {arguments.steps} steps")


if __name__ == "__main__":
    main()
