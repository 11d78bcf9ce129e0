"""Train the demo models: `python -m studies.demo.train --text DIR --out DIR --device cpu|cuda`.

The output directory gets `text-sample/` and `model-gpt2/`, `model-llama/`, `model-bert/`, laid out like the
data of this package, and `work-*/`, the state from which an interrupted run goes on when the same command is
given again.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from adaattn_hf._files import write_atomically

from .architectures import RECIPES, Recipe, build
from .card import model_card
from .corpus import Document, load_documents, of_split
from .loop import Progress, Streams, train
from .measure import measure
from .samples import corpus_fingerprint, write_json, write_samples
from .vocabulary import TOKENIZERS

app = typer.Typer(add_completion=False)
console = Console()


def token_stream(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> torch.Tensor:
    """All pages in a row of token ids `[tokens]`, each after the token that begins a text (BERT: `[SEP]`)."""
    first = tokenizer.sep_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    encoded = tokenizer([document.page for document in documents], add_special_tokens=False, verbose=False)
    return torch.tensor([token for page in encoded["input_ids"] for token in (first, *page)], device=device)


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with other values, given as `name=value`.

    Raises:
        typer.BadParameter: A name is not one of the recipe, or a value is not of its type.
    """
    known = asdict(recipe)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known:
            raise typer.BadParameter(f"--setting is {setting!r}, expected NAME=VALUE of {', '.join(known)}")
        try:
            recipe = replace(recipe, **{key: type(known[key])(value)})
        except ValueError as error:
            kind = type(known[key]).__name__
            raise typer.BadParameter(f"--setting {key} is {value!r}, expected {kind}") from error
    return recipe


def environment(device: torch.device) -> dict[str, str]:
    """Hardware and versions, for the record."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else f"CPU ({platform.machine()})",
        "dtype": "bf16 autocast" if on_cuda else "fp32",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a model directory that loads in fp32 from weights stored in fp16."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    weights = {
        name: value.detach().to("cpu", torch.float16).contiguous()
        for name, value in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def on_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model, moved."""
    torch.nn.Module.to(model, device)
    return model


def train_one(
    name: str,
    documents: Sequence[Document],
    recipe: Recipe,
    out: Path,
    device: torch.device,
    stop_after: int | None,
) -> Progress:
    """Train one demo model, measure the stored weights and write its directory."""
    tokenizer = TOKENIZERS[name]([d.page for d in of_split(documents, "train")])
    streams = {
        split: token_stream(of_split(documents, split), tokenizer, device)
        for split in ("train", "validation", "heldout")
    }
    torch.manual_seed(recipe.seed)
    model = on_device(build(name, tokenizer, recipe), device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(name, total=recipe.steps)

        def show(progress: Progress) -> None:
            bars.update(task, completed=progress.step)
            if progress.history and progress.history[-1]["step"] == progress.step:
                row = progress.history[-1]
                console.print(
                    f"{name} step {progress.step}: train {row['train_nll']:.4f}, "
                    f"validation {row['validation_nll']:.4f} nats/token, {progress.seconds:.0f} s"
                )

        work = out / f"work-{name}"
        progress = train(
            model,
            tokenizer,
            Streams(streams["train"], streams["validation"]),
            recipe,
            work,
            stop_after=stop_after,
            on_progress=show,
        )
    model.load_state_dict(torch.load(work / "best.pt", map_location=device, weights_only=True))
    directory = out / f"model-{name}"
    export(model, tokenizer, directory)
    stored: PreTrainedModel = on_device(type(model).from_pretrained(directory), device)
    record: dict[str, Any] = {
        "model": name,
        "parameters": stored.num_parameters(),
        "recipe": asdict(recipe),
        "steps_run": progress.step,
        "best_step": progress.best_step,
        "seconds": progress.seconds,
        "tokens": {split: len(stream) for split, stream in streams.items()},
        "corpus_sha256": corpus_fingerprint(documents),
        "environment": environment(device),
        "figures": measure(stored, streams, recipe, tokenizer),
        "history": progress.history,
    }
    write_json(directory / "training.json", record)
    write_atomically(directory / "README.md", model_card(name, record))
    return progress


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Directory of the results and of the resumable state.")],
    text: Annotated[
        Path, typer.Option(help="Directory of the npm tarballs; what is missing is downloaded into it.")
    ] = Path("demo-text"),
    model: Annotated[
        list[str] | None, typer.Option(help="gpt2, llama or bert; may be repeated. Default: all three.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    setting: Annotated[
        list[str] | None, typer.Option(help="Another value in the recipe, e.g. steps=100; may be repeated.")
    ] = None,
    stop_after: Annotated[int | None, typer.Option(help="Stop at this step; can go on later.")] = None,
) -> None:
    """Train the demo models and write the text sample."""
    names = model or list(RECIPES)
    unknown = sorted(set(names) - set(RECIPES))
    if unknown:
        raise typer.BadParameter(f"--model is {', '.join(unknown)}, expected {', '.join(RECIPES)}")
    documents = load_documents(text)
    write_samples(documents, out / "text-sample")
    for name in names:
        recipe = with_settings(RECIPES[name], setting or [])
        train_one(name, documents, recipe, out, torch.device(device), stop_after)


if __name__ == "__main__":
    app()
