"""What a user may decide about an evaluation, in one frozen record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from adaattn_hf.eval.errors import UsageError, unknown
from adaattn_hf.eval.scoring import PADDINGS
from adaattn_hf.eval.windows import RECIPES


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
        seed: of that sample.
        prefix_token: token before each document with `rolling`; None is the tokenizer's BOS, else EOS.
        add_bos: whether the tokenizer puts its special tokens around texts; None leaves it to the tokenizer.
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

    def __post_init__(self) -> None:
        if self.windows not in RECIPES:
            raise UsageError(unknown("windows", self.windows, RECIPES))
        if self.padding not in PADDINGS:
            raise UsageError(unknown("padding", self.padding, PADDINGS))
        for name in ("context", "stride", "batch_size", "limit_docs", "limit_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: got {value}, expected at least 1; leave it out for the default")
        if not 0 < self.mask_fraction <= 1:
            raise UsageError(f"mask_fraction: got {self.mask_fraction}, expected more than 0 and at most 1")

    @property
    def implementations(self) -> tuple[str, ...]:
        """The arms, stock first."""
        return (self.against, self.impl, *((self.anchor,) if self.anchor else ()))

    def as_dict(self) -> dict[str, Any]:
        """All settings, for the record."""
        return asdict(self)
