"""`adaattn profile`: measures what each attention head does on a text; a table, JSON, a picture and an HTML page."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._files import json_text, write_atomically
from ..errors import DataUnavailable, EvalError, UsageError
from .interrupt import leave, of_file
from .json_output import AsJson

if TYPE_CHECKING:
    from torch import Tensor


def profile(
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id or directory. Default: the small LLaMA-class model of the package."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="What `adaattn eval` reads. Default: wikitext, or the package's text for its model."
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence. Default: 2048, or the model's maximum.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that are read.")] = 2,
    decode: Annotated[int, typer.Option(min=0, help="Tokens generated behind the first sequence.")] = 8,
    padded: Annotated[bool, typer.Option("--padded", help="Read a batch of two lengths, too.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Query rows sampled per call.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of that sample.")] = 0,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", help="layer.head whose attention map is drawn. Several times."),
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="File or directory of a plan to run; none: without one.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Plan whose errors are drawn beside each --map: exact weights minus its own."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for profile.json and atlas.html. Default: only the table.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Picture to draw (.png, .svg, .pdf); needs matplotlib.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, where it is not the model's own.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure entropy, attention sinks, distances, block density, score ranks and rounding per layer and head.

    Rows are sampled and no attention matrix is made, so that 8k tokens and more fit. The page of --out needs
    no network.

    Exit codes: 0 done; 2 usage; 3 data unavailable; 4 model unavailable.
    """
    from adaattn_hf.eval.settings import Loading

    from .options import use_threads, writable

    loading = Loading(dtype, device, tokenizer, revision, gguf_file)
    try:
        use_threads(threads)
        for directory, name in ((out, "out"), (figure and figure.parent, "figure")):
            if directory is not None:
                writable(directory, name)
        if figure is not None:
            _refuse_unwritable(figure)
        if against is not None and not maps:
            raise UsageError(
                "against: got a plan and no map, expected --map layer.head of the head to look at"
            )
        wanted = tuple(_layer_and_head(text) for text in maps or ())
        _run(
            model,
            data or (),
            loading,
            length,
            sequences,
            decode,
            padded,
            rows,
            seed,
            wanted,
            plan,
            against,
            out,
            figure,
            as_json,
        )
    except EvalError as error:
        leave(error)
    except ValueError as error:
        leave(UsageError(str(error)))
    except OSError as error:
        leave(DataUnavailable(f"file: {of_file(error, out)}"))


def _layer_and_head(text: str) -> tuple[int, int]:
    """Layer and head of `3.7`.

    Raises:
        UsageError: It is not that.
    """
    layer, _, head = text.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise UsageError(f"map: got {text!r}, expected layer.head such as 3.7")
    return int(layer), int(head)


def _refuse_unwritable(figure: Path) -> None:
    """Refuses a picture of a kind that Matplotlib does not write.

    Raises:
        UsageError: It is one, or has no suffix.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if figure.suffix.lower().removeprefix(".") not in kinds:
        raise UsageError(f"figure: got {figure}, expected a file that ends with one of {', '.join(kinds)}")


def _run(
    model: str | None,
    data: Any,
    loading: Any,
    length: int | None,
    sequences: int,
    decode: int,
    padded: bool,
    rows: int,
    seed: int,
    maps: tuple[tuple[int, int], ...],
    plan: str | None,
    against: str | None,
    out: Path | None,
    figure: Path | None,
    as_json: bool,
) -> None:
    import torch
    from rich.console import Console

    from adaattn_hf.eval import atlas, runner
    from adaattn_hf.eval.demo import demo_model_path
    from adaattn_hf.eval.provenance import provenance
    from adaattn_hf.patches.checkpoint import give_plan, load
    from adaattn_hf.patches.observe.record import record

    checkpoint = load(model or demo_model_path("llama"), implementation="adaattn", **loading.keywords())
    give_plan(checkpoint.model, plan)
    longest = checkpoint.max_length or 2048
    size = min(2048, longest) if length is None else length
    if size > longest:
        raise UsageError(
            f"length: got {size}, expected at most the {longest} tokens that the model has positions for"
        )
    name, ids = _tokens(checkpoint, data, size * sequences, model is None)
    ids = ids[: len(ids) // size * size].view(-1, size) if len(ids) >= size else ids[None]
    network, generates = checkpoint.model, checkpoint.model.can_generate()
    keywords = {"use_cache": False} if generates else {}
    with record(network, rows=rows, seed=seed, maps=maps, against=against) as seen, torch.inference_mode():
        for row in ids:
            network(input_ids=row[None].to(checkpoint.device), **keywords)
        if decode and generates:
            _generate(network, ids[:1].to(checkpoint.device), decode, longest)
        if padded:
            _padded(network, ids, checkpoint.pad_token(), keywords)
    console = Console(stderr=as_json)
    console.print(str(seen), markup=False, highlight=False, soft_wrap=True)
    lacking = [f"{layer}.{head}" for (layer, head), image in seen.maps.items() if image is None]
    if lacking:
        raise UsageError(
            f"map: got {', '.join(lacking)}, expected layer.head of this model, see the table above"
        )
    recorded = {
        "model": checkpoint.name,
        "text": name,
        "tokens": ids.numel(),
        "plan": plan,
        "provenance": provenance(checkpoint.device),
        **seen.to_dict(),
    }
    for image in recorded["maps"]:
        image["labels"] = _labels(checkpoint.tokenizer, ids[0].tolist(), len(image["weights"]))
    if out is not None:
        runner.write_json(out / "profile.json", recorded)
        about = (
            f"{len(ids)} x {ids.shape[1]} tokens of {name}, {rows} rows sampled per call, {checkpoint.dtype}"
        )
        write_atomically(out / "atlas.html", atlas.page(recorded, f"Attention of {checkpoint.name}", about))
        console.print(f"profile: {out / 'profile.json'}, {out / 'atlas.html'}", markup=False, soft_wrap=True)
    if figure is not None:
        seen.figure().savefig(figure)
        console.print(f"figure: {figure}", markup=False, soft_wrap=True)
    if as_json:
        print(json_text(recorded, indent=1))


def _labels(tokenizer: Any, ids: list[int], bins: int) -> list[str]:
    """Text of the tokens that each row or column of a map stands for, its beginning where it is long."""
    borders = [-(-place * len(ids) // bins) for place in range(bins + 1)]
    texts = [tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(borders)]
    return [text if len(text) <= 32 else f"{text[:31]}…" for text in texts]


def _generate(network: Any, prompt: Tensor, count: int, longest: int) -> None:
    """Decode steps behind a prompt that leaves room for them."""
    prompt = prompt[:, : max(1, longest - count)]
    network.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)


def _padded(network: Any, ids: Tensor, pad_token: int, keywords: dict[str, Any]) -> None:
    """A batch of a whole and a half sequence, padded on the left."""
    import torch

    half = ids.shape[1] // 2
    mask = torch.ones(2, ids.shape[1], dtype=torch.long, device="cpu")
    mask[1, :half] = 0
    rows = torch.stack([ids[0], ids[0].masked_fill(mask[1] == 0, pad_token)])
    device = network.device
    network(input_ids=rows.to(device), attention_mask=mask.to(device), **keywords)


def _tokens(checkpoint: Any, specs: Any, count: int, packaged: bool) -> tuple[str, Tensor]:
    """Name of the text and its first tokens.

    Raises:
        DataUnavailable: There is no text.
    """
    import torch

    from adaattn_hf.eval import corpora
    from adaattn_hf.eval.demo import heldout_pages

    if not specs and packaged:
        name, texts = "the package's held-out pages", heldout_pages()
    else:
        corpus = [corpora.load(spec) for spec in specs or ("wikitext",)]
        name, texts = ", ".join(c.name for c in corpus), [d.text for c in corpus for d in c.documents]
    found: list[int] = []
    for text in texts:
        found += checkpoint.tokenizer.encode(text, verbose=False)
        if len(found) >= count:
            break
    if len(found) < 2:
        raise DataUnavailable(f"data: {name} holds {len(found)} tokens, expected text")
    return name, torch.tensor(found[:count], dtype=torch.int64, device="cpu")
