"""Settings of an evaluation: what is compared, and how.

Each is the option of `adaattn eval` of the same name, whose help says what it means.
"""

from dataclasses import dataclass

from adaattn_hf.attention.stored import CACHE_FORMATS
from adaattn_hf.errors import UsageError, unknown

RECIPES = ("rolling", "strided")
PADDINGS = ("none", "right", "left")


@dataclass(frozen=True)
class Settings:
    """Settings of one evaluation. Raises UsageError for values that are out of range, or contradict each other."""

    attn_implementation: str = "adaattn"
    baseline: str = ""
    plan: str | None = None
    baseline_plan: str | None = None
    cache: str | None = None
    cache_piece: int = 64
    streaming: bool = False
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

    def __post_init__(self) -> None:
        if not self.baseline:
            object.__setattr__(self, "baseline", "sdpa" if self.baseline_plan is None else self.attn_implementation)
        for name, accepted in (("windows", RECIPES), ("padding", PADDINGS), ("cache", CACHE_FORMATS)):
            value = getattr(self, name)
            if value is not None and value not in accepted:
                raise UsageError(unknown(name, value, accepted))
        for name in ("context", "stride", "batch_size", "limit_docs", "limit_tokens", "cache_piece"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: got {value}, expected at least 1; leave it out for the default")
        if self.seed < 0:
            raise UsageError(f"seed: got {self.seed}, expected at least 0")
        if self.prefix_token is not None and not 0 <= self.prefix_token < 1 << 31:
            raise UsageError(f"prefix_token: got {self.prefix_token}, expected the number of a token of this model")
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
