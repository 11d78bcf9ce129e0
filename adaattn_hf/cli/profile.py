"""`adaattn profile`: measures what each attention head does on a text; a table, JSON and an HTML page."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from adaattn_hf.eval.progress import tell
from adaattn_hf.eval.settings import Loading

from .._files import write_atomically
from ..errors import DataUnavailable, UsageError
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_json
from .options import Threads, use_threads, writable

if TYPE_CHECKING:
    from torch import Tensor

PANELS = {"Basic": ("data", "length", "plan", "maps", "output_dir", "dtype", "device")}


@dataclass(frozen=True)
class Profile:
    """Options: what to read, and what to draw.

    Attributes:
        data: Text, as for `adaattn eval`. Default: wikitext, or the package's text for its model.
        length: Tokens per sequence. Default: 2048, or the model's maximum.
        sequences: Number of sequences.
        decode: Tokens to generate after the first sequence.
        rows: Query rows sampled per call.
        seed: Seed of that sample.
        maps: Draw the attention map of this layer.head. May be given several times.
        plan: File, directory or hub id of a plan to run; none runs without one.
        against: Next to each --map, draw the error of this plan: exact weights minus the plan's.
        output_dir: Directory for profile.json and atlas.html. Default: only the table.
    """

    data: tuple[str, ...] = ()
    length: int | None = field(default=None, metadata={"least": 2})
    sequences: int = field(default=2, metadata={"least": 1})
    decode: int = field(default=8, metadata={"least": 0})
    rows: int = field(default=64, metadata={"least": 1})
    seed: int = 0
    maps: tuple[str, ...] = field(default=(), metadata={"option": "--map"})
    plan: str | None = None
    against: str | None = None
    output_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.against is not None and not self.maps:
            raise UsageError("against: got a plan and no map, expected --map layer.head of the head to look at")
        self.heads()

    def heads(self) -> tuple[tuple[int, int], ...]:
        """Returns layer and head of each map. Raises UsageError where one is not of the form `3.7`."""
        found = []
        for text in self.maps:
            layer, _, head = text.partition(".")
            if not (layer.isdecimal() and head.isdecimal()):
                raise UsageError(f"map: got {text!r}, expected layer.head such as 3.7")
            found.append((int(layer), int(head)))
        return tuple(found)


@with_options(asked=Profile, loading=Loading)
def profile(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or directory. Default: the small LLaMA-class model of the package.")
    ] = None,
    *,
    asked: Profile,
    loading: Loading,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each head attends to: entropy, sinks, distances, block density, score ranks, rounding.

    It samples rows and makes no attention matrix, so 8k tokens and more fit. The page in --output-dir works offline.

    Exit codes: 0 done; 2 usage; 3 data unavailable; 4 model unavailable.
    """
    with ending(default=asked.output_dir, wrong=(ValueError,)):
        use_threads(threads)
        if asked.output_dir is not None:
            writable(asked.output_dir, "output_dir")
        _run(model, loading, asked, as_json)


def _run(model: str | None, loading: Loading, asked: Profile, as_json: bool) -> None:
    import torch

    from adaattn_hf.eval import pages, runner
    from adaattn_hf.eval.demo import demo_model_path
    from adaattn_hf.eval.provenance import provenance
    from adaattn_hf.patches.checkpoint import NO_PLAN, give_plan, load
    from adaattn_hf.patches.observe.record import record

    plans = (asked.plan, asked.against or NO_PLAN)
    checkpoint = load(model or demo_model_path("llama"), implementation="adaattn", plans=plans, **asdict(loading))
    give_plan(checkpoint.model, asked.plan)
    longest = checkpoint.max_length or 2048
    size = min(2048, longest) if asked.length is None else asked.length
    if size > longest:
        raise UsageError(f"length: got {size}, expected at most the {longest} tokens that the model has positions for")
    name, ids = _tokens(checkpoint, asked.data, size * asked.sequences, model is None)
    ids = ids[: len(ids) // size * size].view(-1, size) if len(ids) >= size else ids[None]
    network, generates = checkpoint.model, checkpoint.model.can_generate()
    keywords = {"use_cache": False} if generates else {}
    recording = record(network, rows=asked.rows, seed=asked.seed, maps=asked.heads(), against=asked.against)
    with recording as seen, torch.inference_mode():
        for row in ids:
            network(input_ids=row[None].to(checkpoint.device), **keywords)
        if asked.decode and generates:
            prompt, count = ids[:1, : max(1, longest - asked.decode)].to(checkpoint.device), asked.decode
            network.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    console = Console(stderr=as_json)
    console.print(str(seen), markup=False, highlight=False, soft_wrap=True)
    lacking = [f"{layer}.{head}" for (layer, head), image in seen.maps.items() if image is None]
    if lacking:
        raise UsageError(f"map: got {', '.join(lacking)}, expected layer.head of this model, see the table above")
    recorded = {
        "model": checkpoint.name,
        "text": name,
        "tokens": ids.numel(),
        "plan": asked.plan,
        "provenance": provenance(checkpoint.device),
        **seen.to_dict(),
    }
    for image in recorded["maps"]:
        image["labels"] = _labels(checkpoint.tokenizer, ids[0].tolist(), len(image["weights"]))
    if asked.output_dir is not None:
        runner.write_json(asked.output_dir / "profile.json", recorded)
        about = f"{len(ids)} x {ids.shape[1]} tokens of {name}, {asked.rows} rows sampled per call, {checkpoint.dtype}"
        page = pages.atlas(recorded, f"Attention of {checkpoint.name}", about)
        write_atomically(asked.output_dir / "atlas.html", page)
        tell(console, f"profile: {asked.output_dir / 'profile.json'}, {asked.output_dir / 'atlas.html'}")
    if as_json:
        print_json(recorded)


def _labels(tokenizer: Any, ids: list[int], bins: int) -> list[str]:
    borders = [-(-place * len(ids) // bins) for place in range(bins + 1)]
    texts = [tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(borders)]
    return [text if len(text) <= 32 else f"{text[:31]}…" for text in texts]


def _tokens(checkpoint: Any, specs: Any, count: int, packaged: bool) -> tuple[str, Tensor]:
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
