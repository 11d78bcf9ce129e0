"""Settings of an evaluation: what is compared, how the text is cut, which checkpoint, where reports go."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaattn_hf.errors import UsageError, unknown

from .scoring import CACHES, PADDINGS
from .windows import RECIPES


@dataclass(frozen=True)
class Settings:
    """Settings of one evaluation.

    Attributes:
        impl: attention implementation under test.
        against: the stock implementation that it replaces.
        anchor: a second stock implementation, whose distance from `against` is the resolution of the dtype.
        windows: `rolling` or `strided` (see `adaattn_hf.eval.windows`); masked LMs have a recipe of their
            own.
        context: tokens of a window; None is the model's own maximum.
        stride: tokens between windows; None is the context (disjoint windows).
        batch_size: windows per forward pass.
        padding: `none` (batches of equal lengths), or `right` or `left`: the windows as they come, padded and
            masked.
        limit_docs: only so many documents.
        limit_tokens: only so many tokens of text, counted before windows are cut; the last document may be
            cut short.
        mask_fraction: for masked LMs, the share of tokens that is scored.
        seed: seed of that sample.
        prefix_token: token before each document with `rolling`; None is the tokenizer's BOS, else EOS.
        add_bos: whether the tokenizer puts its special tokens around texts; None leaves it to the tokenizer.
        plan: file or directory of the plan that `impl` runs; `none` runs it without the plan that the model
            carries; None leaves the model as it is.
        against_plan: the same for `against`, which is then an implementation of ours: two plans are compared.
        cache: what the cache of `impl` stores (see `AdaAttnCache`): every arm then reads its windows in pieces over
            a cache, as decoding does, the others over `DynamicCache`; None reads windows whole, without one.
        cache_piece: tokens of such a piece.
        streaming: heads to which the plan of `impl` gives a window keep it alone in that cache.
    """

    impl: str = "adaattn"
    against: str = "sdpa"
    anchor: str | None = None
    windows: str = "rolling"
    context: int | None = None
    stride: int | None = None
    batch_size: int = 1
    padding: str = "none"
    limit_docs: int | None = None
    limit_tokens: int | None = None
    mask_fraction: float = 1.0
    seed: int = 0
    prefix_token: int | None = None
    add_bos: bool | None = None
    plan: str | None = None
    against_plan: str | None = None
    cache: str | None = None
    cache_piece: int = 64
    streaming: bool = False

    def __post_init__(self) -> None:
        if self.windows not in RECIPES:
            raise UsageError(unknown("windows", self.windows, RECIPES))
        if self.padding not in PADDINGS:
            raise UsageError(unknown("padding", self.padding, PADDINGS))
        for name in ("context", "stride", "batch_size", "limit_docs", "limit_tokens", "cache_piece"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: got {value}, expected at least 1; leave it out for the default")
        if self.seed < 0:
            raise UsageError(f"seed: got {self.seed}, expected at least 0")
        if not 0 < self.mask_fraction <= 1:
            raise UsageError(f"mask_fraction: got {self.mask_fraction}, expected more than 0 and at most 1")

        if self.cache is not None and self.cache not in CACHES:
            raise UsageError(unknown("cache", self.cache, CACHES))
        if self.cache is not None and self.padding != "none":
            raise UsageError(
                f"cache: got {self.cache!r} with padding {self.padding!r}, expected --padding none"
            )
        if self.streaming and self.cache is None:
            raise UsageError("streaming: got no cache, expected --cache model, int8 or k8v4 beside it")
        for name, implementation in (("plan", self.impl), ("against_plan", self.against)):
            if getattr(self, name) is not None and not implementation.startswith("adaattn"):
                raise UsageError(
                    f"{name}: got {getattr(self, name)!r} for {implementation!r}, which knows no plans, expected an "
                    "implementation of ours such as adaattn"
                )

    @property
    def implementations(self) -> tuple[str, ...]:
        """The arms, stock first."""
        return (self.against, self.impl, *((self.anchor,) if self.anchor else ()))

    def as_dict(self) -> dict[str, Any]:
        """All settings, for the record."""
        return asdict(self)

    @property
    def caches(self) -> tuple[str | None, ...]:
        """What the cache of each arm stores, None for no cache; `dynamic` is Transformers' own."""
        if self.cache is None:
            return (None,) * len(self.implementations)
        return ("dynamic", self.cache, *(("dynamic",) if self.anchor else ()))

    @property
    def plans(self) -> tuple[str | None, ...]:
        """The plan that each arm is given; the anchor, a stock implementation, has none."""
        return (self.against_plan, self.plan, *((None,) if self.anchor else ()))


@dataclass(frozen=True)
class Loading:
    """Where a checkpoint comes from, and how it is loaded; the fields are `patches.checkpoint.load`'s arguments."""

    dtype: str | None = None
    device: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    objective: str = "auto"
    trust_remote_code: bool = False

    def source(self) -> dict[str, Any]:
        """Those of the arguments that say which checkpoint is read, where they are given."""
        names = ("revision", "gguf_file", "trust_remote_code")
        return {name: value for name in names if (value := getattr(self, name))}

    def keywords(self) -> dict[str, Any]:
        """The arguments; weights are float32 where no dtype is named."""
        return {**asdict(self), "dtype": self.dtype or "float32"}


@dataclass(frozen=True)
class Text:
    """The corpora of an evaluation.

    Attributes:
        specs: what `corpora.load` understands, one a corpus.
        split: split of a dataset.
        separator: text between the documents of a plain file.
    """

    specs: tuple[str, ...] = ()
    split: str = "test"
    separator: str | None = None


@dataclass(frozen=True)
class Limits:
    """Bounds that a report is held against; None asks nothing."""

    max_delta_nll: float | None = None
    max_ppl_ratio: float | None = None


@dataclass(frozen=True)
class Output:
    """Where journals and reports go, and what happens to those that are there.

    Attributes:
        directory: a directory per corpus is made in it.
        resume: go on with the journals that are there.
        overwrite: begin again where a journal is there.
        quiet: no progress bar and no table.
    """

    directory: Path
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
