"""Settings of an evaluation, and the options of `adaattn eval`: what is compared, how, which checkpoint, where to."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from adaattn_hf.errors import UsageError, unknown

RECIPES = ("rolling", "strided")
PADDINGS = ("none", "right", "left")
DTYPE = {"choices": ("float32", "bfloat16", "float16", "auto", "fp32", "bf16", "fp16")}
"""Of options that name a dtype: the words that `patches.checkpoint.resolve_dtype` knows."""


@dataclass(frozen=True)
class Settings:
    """Settings of one evaluation.

    Attributes:
        attn_implementation: Attention implementation under test.
        baseline: Stock implementation that it replaces. Default: sdpa; with --baseline-plan the one under test.
        plan: File, directory or hub id of the plan that is run; none: without the plan that MODEL carries.
        baseline_plan: Compare with this plan (or none: with exact attention of ours), paired.
        cache: Read windows in pieces over a cache, as decoding does, that stores the model's numbers or codes; the
            other arms read over Transformers' own.
        cache_piece: Tokens of such a piece.
        streaming: Heads with a window in the plan keep it alone in that cache.
        anchor: Second stock implementation (eager, say): its distance is the resolution of the dtype.
        windows: rolling (that of lm-eval) or strided (Transformers' documentation). Masked LMs have a recipe of their
            own.
        context: Tokens of a window. Default: the model's maximum.
        stride: Tokens between windows. Default: the context.
        batch_size: Windows per forward pass; does not change perplexity.
        padding: none: batches of equal lengths. right, left: windows as they come, padded and masked.
        limit_docs: Only the first so many documents.
        limit_tokens: Only the first so many tokens of the text.
        mask_fraction: Masked LMs: share of the tokens that is scored.
        seed: Seed of that sample.
        prefix_token: Token before each document. Default: BOS, else EOS.
        add_bos: Whether the tokenizer adds its special tokens. Default: its own setting.
    """

    attn_implementation: str = "adaattn"
    baseline: str = ""
    plan: str | None = None
    baseline_plan: str | None = None
    cache: str | None = field(
        default=None, metadata={"choices": ("model",), "names": ("attention/stored.py", "FORMATS")}
    )
    cache_piece: int = 64
    streaming: bool = False
    anchor: str | None = None
    windows: str = field(default="rolling", metadata={"choices": RECIPES})
    context: int | None = None
    stride: int | None = None
    batch_size: int = 1
    padding: str = field(default="none", metadata={"choices": PADDINGS})
    limit_docs: int | None = None
    limit_tokens: int | None = None
    mask_fraction: float = 1.0
    seed: int = 0
    prefix_token: int | None = None
    add_bos: bool | None = None

    def __post_init__(self) -> None:
        from adaattn_hf.attention.stored import FORMATS  # brings torch, which help does not wait for

        if not self.baseline:
            object.__setattr__(self, "baseline", "sdpa" if self.baseline_plan is None else self.attn_implementation)
        for name, known in (("windows", RECIPES), ("padding", PADDINGS), ("cache", ("model", *FORMATS))):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UsageError(unknown(name, value, known))
        for name in ("context", "stride", "batch_size", "limit_docs", "limit_tokens", "cache_piece"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: got {value}, expected at least 1; leave it out for the default")
        if self.seed < 0:
            raise UsageError(f"seed: got {self.seed}, expected at least 0")
        if not 0 < self.mask_fraction <= 1:
            raise UsageError(f"mask_fraction: got {self.mask_fraction}, expected more than 0 and at most 1")
        if self.cache is not None and self.padding != "none":
            raise UsageError(f"cache: got {self.cache!r} with padding {self.padding!r}, expected --padding none")
        if self.streaming and self.cache is None:
            raise UsageError("streaming: got no cache, expected --cache model, int8 or k8v4 beside it")
        for name, implementation in (("plan", self.attn_implementation), ("baseline_plan", self.baseline)):
            if getattr(self, name) is not None and not implementation.startswith("adaattn"):
                raise UsageError(
                    f"{name}: got {getattr(self, name)!r} for {implementation!r}, which knows no plans, expected an "
                    "implementation of ours such as adaattn"
                )

    @property
    def arms(self) -> list[tuple[str, str, str | None, str | None]]:
        """Role, implementation, plan and cache of each arm, stock first; the cache `dynamic` is Transformers' own."""
        others = None if self.cache is None else "dynamic"
        role = "stock" if self.baseline_plan is None else "reference"
        arms = [
            (role, self.baseline, self.baseline_plan, others),
            ("tested", self.attn_implementation, self.plan, self.cache),
        ]
        return [*arms, ("anchor", self.anchor, None, others)] if self.anchor else arms


@dataclass(frozen=True)
class Source:
    """Which checkpoint is read, and where it runs.

    Attributes:
        device: cpu, cuda, cuda:1, or auto: the layers on all GPUs. Default: cuda if the machine has one.
        revision: Revision of a hub model.
        gguf_file: GGUF file within MODEL.
        trust_remote_code: Allow code from the model's repository.
    """

    device: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False

    def source(self) -> dict[str, Any]:
        """What says which checkpoint, where it is given, as Transformers takes it."""
        every = ("revision", "gguf_file", "trust_remote_code")
        return {name: value for name in every if (value := getattr(self, name))}


@dataclass(frozen=True)
class Loading(Source):
    """Which checkpoint is read, and how it is loaded: the fields are `patches.checkpoint.load`'s arguments.

    Attributes:
        dtype: Of the weights; auto: the checkpoint's. Default: the plan's, else float32.
        tokenizer: Tokenizer, where it is not the model's own.
        objective: How the model is read; auto: as its configuration says.
    """

    dtype: str | None = field(default=None, metadata=DTYPE)
    tokenizer: str | None = None
    objective: str = field(default="auto", metadata={"choices": ("auto", "causal", "masked")})


@dataclass(frozen=True)
class Masking:
    """How a masked-language model is read.

    Attributes:
        mask_share: Share of the tokens that a masked LM is asked for at a time.
        maskings: Times that each sequence is masked anew, for a masked LM.
    """

    mask_share: float = 0.15
    maskings: int = 4


@dataclass(frozen=True)
class Text:
    """The corpora of an evaluation.

    Attributes:
        data: wikitext, lambada (through datasets), wikitext:PATH, lambada:PATH, or a text or jsonl file or a directory
            of them. May be given several times. Default: wikitext.
        split: Split of a dataset.
        document_separator: Text between the documents of a plain file (<|endoftext|>, say).
    """

    data: tuple[str, ...] = ()
    split: str = "test"
    document_separator: str | None = None


@dataclass(frozen=True)
class Limits:
    """Bounds that a report is held against.

    Attributes:
        max_delta_nll: Fail (exit 1) where the one-sided 95 % bound of Δnll, nats/token, is above.
        max_ppl_ratio: Fail (exit 1) where that bound's perplexity ratio is above (1.001, say).
    """

    max_delta_nll: float | None = None
    max_ppl_ratio: float | None = None


@dataclass(frozen=True)
class Output:
    """Where journals and reports go, and what happens to those that are there.

    Attributes:
        output_dir: Directory for journals and reports. Default: a new one under results/eval.
        resume: Go on with the interrupted run in --output-dir.
        overwrite: Begin again where --output-dir has a run.
        quiet: No progress bar and no table.
        verbose: Print every row of the report.
    """

    output_dir: Path | None = None
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("resume: got both --resume and --overwrite, expected one of them")
        if self.resume and self.output_dir is None:
            raise UsageError("resume: got no --output-dir, expected the directory of the interrupted run")

    @cached_property
    def directory(self) -> Path:
        """A directory per corpus is made in it."""
        new = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return self.output_dir or Path("results") / "eval" / new
