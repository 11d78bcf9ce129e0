"""Small models of other families, to calibrate where no checkpoint is at hand: `python -m studies.families gemma …`.

Trained on one text for minutes; what is written beside them, `calibration.txt` and `heldout.txt`, no gradient has seen.
They are for the search for a plan (one key/value head of 256, windows of their own), not for their prose.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from adaattn_hf.eval.demo import demo_model_path

from .demo.architectures import Recipe
from .demo.loop import Streams, train

CONTEXT = 2048
WINDOW = 512
SHARES = {"train": 0.76, "validation": 0.04, "calibration": 0.1, "heldout": 0.1}
"""Parts of the text, one after the other."""
app = typer.Typer(add_completion=False)


def build(
    family: str, tokenizer: PreTrainedTokenizerFast, layers: int = 6, width: int = 192, window: int = WINDOW
) -> PreTrainedModel:
    """Returns a model with fresh weights, five of six layers with a window of their own.

    Args:
        family: `gemma`: Gemma 3, two query heads and one key/value head of 256. `qwen`: Qwen 3, eight query heads and
            two key/value heads of 64.
        tokenizer: Gives the vocabulary.
        layers: Number of layers.
        width: Size of the hidden states.
        window: Keys that these five see.

    Raises:
        ValueError: The family is neither.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

    kinds = ["full_attention" if place % 6 == 5 else "sliding_attention" for place in range(layers)]
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "max_position_embeddings": CONTEXT, "sliding_window": window, "layer_types": kinds, "initializer_range": 0.05,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True,
    }  # fmt: skip
    if family == "gemma":
        heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
        return Gemma3ForCausalLM(Gemma3TextConfig(**common, **heads, query_pre_attn_scalar=256))
    if family == "qwen":
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
        return Qwen3ForCausalLM(Qwen3Config(**common, **heads, use_sliding_window=True))
    raise ValueError(f"family is {family!r}, expected gemma or qwen")


def parts_of(text: str) -> dict[str, str]:
    """Returns the parts of a text by `SHARES`, cut at line breaks."""
    found, start, share = {}, 0, 0.0
    for name, size in SHARES.items():
        share += size
        stop = len(text) if share > 0.999 else text.rfind("\n", 0, int(share * len(text))) + 1
        found[name], start = text[start:stop], stop
    return found


@app.command()
def main(
    family: Annotated[str, typer.Argument(help="gemma or qwen.")],
    text: Annotated[Path, typer.Option(help="A text of some million characters.")],
    out: Annotated[Path, typer.Option(help="Directory of the model and the texts it has not seen.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[
        int, typer.Option(help="Optimizer steps, the first three quarters on short windows.")
    ] = 3000,
    batch: Annotated[int, typer.Option(help="Windows of 2,048 tokens per step.")] = 16,
    width: Annotated[int, typer.Option(help="Size of the hidden states.")] = 192,
) -> None:
    """Train a small model of a family; the same command goes on with what an interrupted one has left."""
    tokenizer: PreTrainedTokenizerFast = cast(Any, AutoTokenizer.from_pretrained(demo_model_path("llama")))
    parts = parts_of(text.read_text(encoding="utf-8"))
    streams = Streams(*(
        torch.tensor(tokenizer(parts[name], add_special_tokens=False, verbose=False)["input_ids"], device=device)
        for name in ("train", "validation")
    ))  # fmt: skip
    recipe = Recipe(
        "causal", CONTEXT, batch, steps, 2e-3, 0.0, warmup=min(200, steps // 5), short_steps=3 * steps // 4,
        short_context=256, evaluate_every=max(1, steps // 6),
    )  # fmt: skip
    torch.manual_seed(recipe.seed)
    model = build(family, tokenizer, width=width)
    torch.nn.Module.to(model, device)
    progress = train(model, tokenizer, streams, recipe, out / "work", on_progress=_said)
    model.load_state_dict(torch.load(out / "work" / "best.pt", map_location=device, weights_only=True))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name in ("calibration", "heldout"):
        (out / f"{name}.txt").write_text(parts[name], encoding="utf-8")
    typer.echo(f"{model.num_parameters():,} parameters, validation {progress.best:.3f} nats/token: {out}")


def _said(progress: Any) -> None:
    if progress.history and progress.history[-1]["step"] == progress.step:
        typer.echo(f"step {progress.step}: {progress.history[-1]}, {progress.seconds:.0f} s")


if __name__ == "__main__":
    app()
