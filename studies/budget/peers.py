"""Other libraries beside a plan at the same text: `python -m studies.budget.peers MODEL --record FILE …`.

NVIDIA ModelOpt's skip-softmax (its PyTorch path, the only one without CUDA) and kvpress, each at several
settings, on one stretch of text. All are scored on the last tokens alone: kvpress drops keys of the context
before these tokens and never changes the prefill, ModelOpt and plans change the prefill. Loss is the KL from
stock attention; time is CPU time of the process for everything that the library does. A library that is not
installed is a row that says so.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from adaattn_hf.errors import UsageError
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.patches.plans import attach

from . import study
from .speed import plans_of_records, seconds, tokens_of

THRESHOLDS = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "StreamingLLMPress")
RATIOS = (0.1, 0.25, 0.5)
WORDS = (
    "Stock is Transformers' sdpa. ModelOpt's `modelopt_triton` needs CUDA; measured is `flash_skip_softmax`, the same"
    " rule in PyTorch over whole score matrices, which shows its loss and not the speed of its kernel. kvpress removes"
    " keys of the context after the prefill: it saves memory and decode time, and costs time here. Each ratio is to"
    " stock attention in the same process."
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Answer = Callable[[], Tensor]


def of_modelopt(model: Any, tokens: Tensor, scored: int) -> Iterator[tuple[str, Answer]]:
    """Yields ModelOpt's skip-softmax at several thresholds."""
    sparsity = importlib.import_module("modelopt.torch.sparsity.attention_sparsity")
    for threshold in THRESHOLDS:
        one = copy.deepcopy(model)
        one.set_attn_implementation("eager")
        settings = copy.deepcopy(sparsity.SKIP_SOFTMAX_DEFAULT)
        settings["sparse_cfg"]["*attn*"]["thresholds"] = {"prefill": [threshold], "decode": [threshold]}
        one = sparsity.sparsify(one, settings)

        def answer(one: Any = one) -> Tensor:
            logits: Tensor = one(input_ids=tokens, use_cache=False, logits_to_keep=scored).logits
            return logits

        yield f"ModelOpt skip-softmax, threshold {threshold:g}", answer


def of_kvpress(model: Any, tokens: Tensor, scored: int) -> Iterator[tuple[str, Answer]]:
    """Yields presses at several compression ratios of the context."""
    from transformers import DynamicCache

    kvpress = importlib.import_module("kvpress")
    model.set_attn_implementation("sdpa")
    for name in PRESSES:
        for ratio in RATIOS:

            def answer(name: str = name, ratio: float = ratio) -> Tensor:
                cache = DynamicCache(config=model.config)
                before = torch.arange(tokens.shape[1] - scored, device=tokens.device)
                with getattr(kvpress, name)(compression_ratio=ratio)(model):
                    # presses ask for the positions that Transformers no longer hands to its layers
                    model(
                        input_ids=tokens[:, :-scored],
                        past_key_values=cache,
                        logits_to_keep=1,
                        cache_position=before,
                    )
                at = torch.arange(tokens.shape[1] - scored, tokens.shape[1], device=tokens.device)[None]
                logits: Tensor = model(
                    input_ids=tokens[:, -scored:], past_key_values=cache, position_ids=at
                ).logits
                return logits

            yield f"kvpress {name.removesuffix('Press')}, {ratio:.0%} of the context removed", answer


def of_plan(model: Any, plan: Any, tokens: Tensor, scored: int) -> Answer:
    """Returns the answer of a plan."""

    def answer() -> Tensor:
        model.set_attn_implementation("adaattn")
        attach.attach(model, plan, unverified=True)
        logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=scored).logits
        attach.remove_plan(model)
        return logits

    return answer


PEERS: dict[str, tuple[str, Callable[[Any, Tensor, int], Iterator[tuple[str, Answer]]]]] = {
    "modelopt": ("nvidia-modelopt", of_modelopt),
    "kvpress": ("kvpress", of_kvpress),
}


@torch.no_grad()
def compare(
    model: Any,
    plans: dict[str, Any],
    tokens: Tensor,
    scored: int,
    keep: Callable[[list[dict[str, Any]]], None],
    wanted: re.Pattern[str] = re.compile(""),
    earlier: Sequence[dict[str, Any]] = (),
) -> None:
    """Measures stock, the plans, and each peer that is installed; hands over the rows after each.

    Args:
        model: The model.
        plans: Plans by name.
        tokens: `[1, length]` the text.
        scored: How many of its last tokens are scored.
        keep: Given all rows after each new one.
        wanted: Rows whose name holds a match are measured; stock attention always is.
        earlier: Rows that were measured before and are kept.
    """
    rows: list[dict[str, Any]] = list(earlier)
    known = {row["what"] for row in rows}
    targets = torch.cat(
        [tokens[0, -scored + 1 :], tokens[0, :1]]
    )  # the last row predicts nothing and is left out

    def stock() -> Tensor:
        model.set_attn_implementation("sdpa")
        logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=scored).logits
        return logits

    reference: list[Tensor] = []
    base: list[float] = []

    def add(name: str, answer: Answer) -> None:
        if reference and (name in known or not wanted.search(name)):
            return
        found: list[Tensor] = []
        taken = seconds(lambda: found.append(answer()), tokens.device)
        scores = found[0][0].double().log_softmax(-1)
        if not reference:
            reference.append(scores)
            base.append(taken)
            if name in known:
                return
        kl = (reference[0].exp() * (reference[0] - scores)).sum(-1)[:-1].mean()
        delta = (reference[0] - scores).gather(1, targets[:, None])[:-1].mean()
        rows.append(
            {
                "what": name,
                "KL": float(kl),
                "Δnll": float(delta),
                "seconds": taken,
                "times stock": base[0] / taken,
            }
        )
        keep(rows)

    add("stock sdpa", stock)
    for name, plan in plans.items():
        add(f"plan, {name}", of_plan(model, plan, tokens, scored))
    for module, (package, peer) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            absent = f"{package}: not installed"
            if absent not in known:
                rows.append({"what": absent, "KL": "", "Δnll": "", "seconds": "", "times stock": ""})
                keep(rows)
            continue
        version = importlib.metadata.version(package)
        for name, answer in peer(model, tokens, scored):
            add(f"{name} ({version})", answer)


@app.command()
def peers(
    model: study.Model,
    record: Annotated[list[str], typer.Option(help="A plan, NAME=FILE of `study seeds`.")],
    data: study.Data,
    output: Annotated[Path, typer.Option(help="The file of the figures.")],
    only: Annotated[
        str, typer.Option(help="Regular expression; rows that match. Those in the file are kept.")
    ] = "",
    length: Annotated[int, typer.Option(help="Tokens of the text.")] = 4096,
    scored: Annotated[int, typer.Option(help="Last tokens that are scored.")] = 512,
    dtype: study.Dtype = "float32",
    device: study.Device = "cpu",
    threads: study.Threads = None,
    gguf_file: study.Gguf = None,
) -> None:
    """Measure loss and time of other libraries beside plans."""
    try:
        wanted = re.compile(only)
    except re.error as error:
        raise UsageError(f"--only: got {only!r}, which is no regular expression ({error})") from error
    loaded, encode = study.load(model, dtype, device, gguf_file, threads)
    tokens = tokens_of(data, encode, length, loaded)
    plans = plans_of_records(record, loaded, tokens)
    words = {
        "model": Path(model).name,
        "dtype": dtype,
        "data": [path.name for path in data],
        "length": length,
    }

    settings = {**words, "scored": scored}
    earlier = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    if earlier and earlier["settings"] != settings:
        raise UsageError(
            f"--output: {output} holds rows of {earlier['settings']}, expected {settings}; give another file"
        )

    def keep(rows: list[dict[str, Any]]) -> None:
        made = {"settings": settings, "provenance": provenance(torch.device(device))}
        study.write(
            output, {**made, "words": [WORDS, f"{length} tokens, the last {scored} scored."], "rows": rows}
        )
        typer.echo(json.dumps(rows[-1], ensure_ascii=False))

    compare(loaded, plans, tokens, scored, keep, wanted, earlier.get("rows", []))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; wrong arguments end with code 2."""
    study.run_app(app, "peers", argv)


if __name__ == "__main__":
    main()
