"""`adaattn profile`: measures what each attention head does on a text; a table, JSON and an HTML page."""

import itertools
from typing import Any

import torch
from rich.console import Console

from adaattn_hf._files import write_atomically
from adaattn_hf.errors import DataUnavailable, UsageError
from adaattn_hf.eval import corpora, pages, runner
from adaattn_hf.eval.demo import demo_model_path, heldout_pages
from adaattn_hf.eval.progress import tell
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.patches.checkpoint import NO_PLAN, give_plan, load
from adaattn_hf.patches.observe.record import record

from .ending import ending, use_threads, writable
from .options import Done, Options


def run(options: Options) -> Done:
    """Measures, and returns what was recorded."""
    with ending(default=options.output_dir, wrong=(ValueError,)):
        use_threads(options.threads)
        if options.output_dir is not None:
            writable(options.output_dir, "output_dir")
        return Done(_recorded(options))


def _recorded(options: Options) -> dict[str, Any]:
    corpora.refuse_missing(options.data)
    plans = (options.plan, options.against or NO_PLAN)
    name = options.model or demo_model_path("llama")
    checkpoint = load(name, implementation="adaattn", plans=plans, **options.loading())
    give_plan(checkpoint.model, options.plan)
    longest = checkpoint.max_length or 2048
    size = min(2048, longest) if options.length is None else options.length
    if size > longest:
        raise UsageError(f"length: got {size}, expected at most the {longest} tokens that the model has positions for")
    if not options.data and options.model is None:
        text, texts = "the package's held-out pages", heldout_pages()
    else:
        corpus = [corpora.load(spec) for spec in options.data or ("wikitext",)]
        text, texts = ", ".join(c.name for c in corpus), [d.text for c in corpus for d in c.documents]
    count, tokens = size * options.sequences, list[int]()
    for one in texts:
        if len(tokens) < count:
            tokens += checkpoint.tokenizer.encode(one, verbose=False)
    if len(tokens) < 2:
        raise DataUnavailable(f"data: {text} holds {len(tokens)} tokens, expected text")
    ids = torch.tensor(tokens[:count], dtype=torch.int64, device="cpu")
    ids = ids[: len(ids) // size * size].view(-1, size) if len(ids) >= size else ids[None]
    network, generates = checkpoint.model, checkpoint.model.can_generate()
    keywords = {"use_cache": False} if generates else {}
    recording = record(network, rows=options.rows, seed=options.seed, maps=options.heads, against=options.against)
    with recording as seen, torch.inference_mode():
        for row in ids:
            network(input_ids=row[None].to(checkpoint.device), **keywords)
        if options.decode and generates:
            prompt, count = ids[:1, : max(1, longest - options.decode)].to(checkpoint.device), options.decode
            network.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    console = Console(stderr=options.as_json)
    console.print(str(seen), markup=False, highlight=False, soft_wrap=True)
    lacking = [f"{layer}.{head}" for (layer, head), image in seen.maps.items() if image is None]
    if lacking:
        raise UsageError(f"map: got {', '.join(lacking)}, expected layer.head of this model, see the table above")
    recorded = {
        "model": checkpoint.name,
        "text": text,
        "tokens": ids.numel(),
        "plan": options.plan,
        "provenance": provenance(checkpoint.device),
        **seen.to_dict(),
    }
    for image in recorded["maps"]:
        bins = len(image["weights"])
        borders = [-(-place * ids.shape[1] // bins) for place in range(bins + 1)]
        words = [checkpoint.tokenizer.decode(ids[0, a:b].tolist()) for a, b in itertools.pairwise(borders)]
        image["labels"] = [word if len(word) <= 32 else f"{word[:31]}…" for word in words]
    if options.output_dir is not None:
        runner.write_json(options.output_dir / "profile.json", recorded)
        about = (
            f"{len(ids)} x {ids.shape[1]} tokens of {text}, {options.rows} rows sampled per call, {checkpoint.dtype}"
        )
        page = pages.atlas(recorded, f"Attention of {checkpoint.name}", about)
        write_atomically(options.output_dir / "atlas.html", page)
        tell(console, f"profile: {options.output_dir / 'profile.json'}, {options.output_dir / 'atlas.html'}")
    return recorded
