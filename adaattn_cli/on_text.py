"""Options and help of the commands that read text: `eval`, `profile`, `calibrate` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from .options import (
    AIMS,
    CACHES,
    DEMO_DIRECTORY,
    DTYPES,
    FAMILIES,
    PADDINGS,
    PLAN_DIRECTORY,
    RECIPES,
    Json,
    Judged,
    Loading,
    Source,
    Threads,
    argument,
    option,
    share,
    tokens,
    words,
)  # fmt: skip

TEXT = "Text in UTF-8: .txt, .md, .jsonl with a field text, or directories of them"


@dataclass(frozen=True, kw_only=True)
class Eval(Loading, Threads, Json):
    """Compare an attention implementation with stock attention on real text.

    Without MODEL it measures the three small models that come with the package, on their held-out text, offline. All
    arms read the same tokens in the same batches. The report has perplexity (token, word, byte), the paired difference
    with a confidence interval over documents, KL, top-1 agreement, activation rate, speed and memory. --resume
    continues an interrupted run (Ctrl-C). Under `accelerate launch` or `torchrun` the processes share the batches.

    Exit codes: 0 done; the bound, if one was asked for, is kept; 1 measured, but the bound that was asked for
    (--max-ppl-ratio) is broken; 2 usage: an argument is wrong, or two contradict each other; 3 data
    unavailable: the corpus is neither local, nor cached, nor to be downloaded, or cannot be read; 4 model unavailable:
    no such checkpoint, no tokenizer, no output head, or no such attention; 5 the output directory belongs to another
    run (the reason names what differs); 6 out of memory: what would fit is said; finished work is kept and --resume
    continues it; 130 interrupted; finished work is kept and --resume continues it.
    """

    panels: ClassVar = {
        "Basic": ("data", "plan", "attn_implementation", "baseline", "dtype", "device", "batch_size", "output_dir"),
        "Verification": ("max_ppl_ratio", "baseline_plan", "anchor"),
    }

    model: str | None = argument(None, "Hub id or directory of a causal or masked LM.")
    data: tuple[str, ...] = option(
        (),
        "wikitext, lambada (through datasets), wikitext:PATH, lambada:PATH, or a text or jsonl file or a directory of "
        "them. May be given several times. Default: wikitext.",
    )
    split: str = option("test", "Split of a dataset.")
    document_separator: str | None = option(None, "Text between the documents of a plain file (<|endoftext|>, say).")
    attn_implementation: str = option("adaattn", "Attention implementation under test.")
    baseline: str = option(
        "", "Stock implementation to replace. Default: sdpa; with --baseline-plan the one under test."
    )
    plan: str | None = option(None, "File, directory or hub id of the plan to run; none: without that of MODEL.")
    baseline_plan: str | None = option(None, "Compare with this plan (or none: with exact attention of ours), paired.")
    cache: str | None = option(
        None,
        "Read windows in pieces over a cache, as decoding does, that stores the model's numbers or codes; the other "
        "arms read over Transformers' own.",
        choices=CACHES,
    )
    cache_piece: int = option(64, "Tokens of such a piece.")
    streaming: bool = option(False, "Heads with a window in the plan keep it alone in that cache.")
    anchor: str | None = option(
        None, "Second stock implementation (eager, say): its distance is the dtype's resolution."
    )
    windows: str = option(
        "rolling",
        "rolling (that of lm-eval) or strided (Transformers' documentation). Masked LMs have a recipe of their own.",
        choices=RECIPES,
    )
    context: int | None = option(None, "Tokens of a window. Default: the model's maximum.")
    stride: int | None = option(None, "Tokens between windows. Default: the context.")
    batch_size: int = option(1, "Windows per forward pass; does not change perplexity.")
    padding: str = option("none", "none: batches of equal lengths. right, left: padded and masked.", choices=PADDINGS)
    limit_docs: int | None = option(None, "Only the first so many documents.")
    limit_tokens: int | None = option(None, "Only the first so many tokens of the text.")
    mask_fraction: float = option(1.0, "Masked LMs: share of the tokens that is scored.")
    seed: int = option(0, "Seed of that sample.")
    prefix_token: int | None = option(None, "Token before each document. Default: BOS, else EOS.")
    add_bos: bool | None = option(None, "Whether the tokenizer adds its special tokens. Default: its own setting.")
    max_ppl_ratio: float | None = option(
        None, "Fail (exit 1) if the one-sided 95 % bound of perplexity over stock's is above (1.001, say)."
    )
    output_dir: Path | None = option(None, "Directory for journals and reports. Default: a new one under results/eval.")
    resume: bool = option(False, "Go on with the interrupted run in --output-dir.")
    overwrite: bool = option(False, "Begin again where --output-dir has a run.")
    quiet: bool = option(False, "No progress bar and no table.")
    verbose: bool = option(False, "Print every row of the report.")

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise ValueError("resume: got both --resume and --overwrite, expected one of them")
        if self.resume and self.output_dir is None:
            raise ValueError("resume: got no --output-dir, expected the directory of the interrupted run")

    @cached_property
    def directory(self) -> Path:
        """Where journals and reports go; a directory per corpus is made in it."""
        new = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return self.output_dir or Path("results") / "eval" / new


@dataclass(frozen=True, kw_only=True)
class Profile(Loading, Threads, Json):
    """Measure what each head attends to: entropy, sinks, distances, block density, score ranks, rounding.

    It samples rows and makes no attention matrix, so 8k tokens and more fit. The page in --output-dir works offline.

    Exit codes: 0 done; 2 usage; 3 data unavailable; 4 model unavailable.
    """

    panels: ClassVar = {"Basic": ("data", "length", "plan", "maps", "output_dir", "dtype", "device")}

    model: str | None = argument(None, "Hub id or directory. Default: the small LLaMA-class model of the package.")
    data: tuple[str, ...] = option((), "Text, as for `adaattn eval`. Default: wikitext, or the packaged model's text.")
    length: int | None = option(None, "Tokens per sequence. Default: 2048, or the model's maximum.", least=2)
    sequences: int = option(2, "Number of sequences.", least=1)
    decode: int = option(8, "Tokens to generate after the first sequence.", least=0)
    rows: int = option(64, "Query rows sampled per call.", least=1)
    seed: int = option(0, "Seed of that sample.")
    maps: tuple[str, ...] = option((), "Draw the attention map of this layer.head. May be repeated.", "--map")
    plan: str | None = option(None, "File, directory or hub id of a plan to run; none runs without one.")
    against: str | None = option(None, "Beside each --map, draw the error of this plan: exact weights minus its own.")
    output_dir: Path | None = option(None, "Directory for profile.json and atlas.html. Default: only the table.")

    def __post_init__(self) -> None:
        if self.against is not None and not self.maps:
            raise ValueError("against: got a plan and no map, expected --map layer.head of the head to look at")
        self.heads()

    def heads(self) -> tuple[tuple[int, int], ...]:
        """Returns layer and head of each map; ValueError where one is not of the form `3.7`."""
        heads = []
        for text in self.maps:
            layer, _, head = text.partition(".")
            if not (layer.isdecimal() and head.isdecimal()):
                raise ValueError(f"map: got {text!r}, expected layer.head such as 3.7")
            heads.append((int(layer), int(head)))
        return tuple(heads)


@dataclass(frozen=True, kw_only=True)
class Calibrate(Source, Judged, Threads, Json):
    """Make a plan for a loss budget, verify it on held-out text, and save it.

    Without MODEL it uses a small LLaMA and the pages that come with the package: offline, about a minute.

    Under `accelerate launch` or `torchrun` the processes share the work and make one plan.

    Exit codes: 0 a plan passed for every budget; 2 wrong arguments; 3 a file cannot be read or written; 4 no plan
    passed for a budget, so it stays exact; 6 out of memory; 130 interrupted.
    """

    panels: ClassVar = {
        "Basic": (
            "data", "budget", "aim", "lengths", "batch", "verify_data", "output_dir", "dtype", "device", "resume",
        ),
        "Verification": ("held_out", "top1", "max_kl", "needles_lost"),
        "Search": (
            "kv_bytes", "families", "minutes", "sequences", "rows", "labels", "joint", "prices", "captured",
        ),
    }  # fmt: skip

    model: str | None = argument(None, "Hub id or directory of a causal or masked LM. Default: the packaged LLaMA.")
    data: tuple[Path, ...] = option(
        (), f"{TEXT}; each source counts equally. Default for the packaged model: the packaged pages."
    )
    budget: tuple[str, ...] = option(
        (),
        "Allowed rise of perplexity (0.1%) or loss in nats/token (1e-3). Given several times: one measurement, and a "
        "plan for each. Default: 0.1%; 1% for the packaged model.",
    )
    verify_data: tuple[Path, ...] = option(
        (), "Held-out text from other sources; the plan must pass on each. Default: other parts of --data."
    )
    lengths: tuple[int, ...] = option(
        (),
        "Lengths in tokens, rising (1k,4k or 4096); tokens beyond the longest are exact. Default: 4096, or what the "
        "model and the text can fill.",
        read=tokens,
    )
    risks: Path | None = option(
        None,
        "Reuse the risks of this plan (directory or file), made from the same weights and text on any machine.",
        "--from",
    )
    prices: Path | None = option(
        None, "Use this adaattn_prices.json of an earlier run: the plan is the same byte for byte."
    )
    dtype: str = option("auto", "Of the weights; auto: the checkpoint's.", choices=DTYPES)
    resume: bool = option(False, "Continue the interrupted run in the plan's directory.")
    verbose: bool = option(False, "Also print nats, levels and versions.")
    quiet: bool = option(False, "No progress.")
    output_dir: Path | None = option(
        None,
        f"Directory for the plan. Default: {PLAN_DIRECTORY} (without MODEL {DEMO_DIRECTORY}). MODEL stays.",
    )
    in_place: bool = option(False, "Write the plan into MODEL, a directory, whose config.json then carries it.")
    aim: str = option(
        "prompt",
        "What the plan is for: prompts of --lengths tokens, one decode step behind so many keys, or the smallest cache "
        "inside the budget; the last two by windows alone.",
        choices=AIMS,
    )
    kv_bytes: float | None = option(
        None, "With --aim memory: cache at the longest length, as a share of the model's (0.4x).", read=share
    )
    families: tuple[str, ...] = option(
        (),
        f"Kinds of choices by commas, some of {', '.join(FAMILIES)}. Default: all that need not be named, on a GPU "
        "without ranks.",
        read=words,
    )
    minutes: float | None = option(None, "End after so many minutes, with the best plan that is verified by then.")
    rows: int = option(256, "Query rows sampled per sequence.")
    labels: int = option(2, "Label draws per sequence, one backward pass each.")
    batch: int = option(1, "Sequences at once: rows of prompts or of a step, as they are timed.", "--batch-size")
    captured: bool = option(
        False, "Price decode steps as in captured CUDA graphs (a static cache): by the device's time alone."
    )


@dataclass(frozen=True, kw_only=True)
class Verify(Source, Judged, Threads, Json):
    """Verify a saved plan again on your text at the level of 95 %, by the same test as in calibration.

    The plan says its budget, lengths, choices and cache. It says no limit: those are the program's, or your options. Of
    the calibration's own text it reads what was held out. It reports which limits were used, and if options, machine,
    torch or transformers differ from those of the calibration. A plan with a cache format is verified over that cache.

    Exit codes: 0 the plan passes; 1 it does not; 2 wrong arguments, no plan, or one of another model; 3 a file cannot
    be read; 4 model unavailable; 6 out of memory.
    """

    panels: ClassVar = {"Basic": ("data", "plan", "device"), "Proof": ("held_out", "top1", "max_kl", "needles_lost")}

    model: str = argument(..., "Hub id or directory of the model that the plan was made for.")
    data: tuple[Path, ...] = option((), f"{TEXT}; the plan must pass on each.")
    plan: Path | None = option(
        None, f"File, directory or hub id of the plan. Default: the one that MODEL carries, or {PLAN_DIRECTORY}."
    )
    quiet: bool = option(False, "No progress.")
