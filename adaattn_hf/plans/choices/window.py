"""A window: each row keeps the last keys before it and the first of its sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from ...attention.call import AttentionCall
from ...attention.structure import MaskStructure
from ..record import LARGEST, read_fields
from .part import Colour, Keys, Setting, register

WINDOWS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
WINDOWS_BOTH_WAYS = (32, 64, 128, 256, 512, 1024, 2048)
"""Of bidirectional attention: a window of W sees 2 W - 1 keys."""
SINKS = 16
"""First keys that candidates keep."""


@register
@dataclass(frozen=True)
class Window(Keys):
    """The first `sinks` keys of the sequence and the last `window`, the query itself counted.

    Where attention looks both ways, as many behind it. Layers with a window of their own keep their own sinks instead.
    """

    window: Annotated[int, (1, LARGEST)]
    sinks: int = 0

    name = "window"
    families = ("window",)
    by_default = True
    for_quantised_cache = "kept"

    def __post_init__(self) -> None:
        read_fields(self)

    @property
    def label(self) -> str:
        """`w1024+16`: a window of 1,024 keys and 16 sinks."""
        return f"w{self.window}+{self.sinks}"

    @property
    def meaning(self) -> str:
        """What the label says."""
        return f"the last {self.window} keys" + (f" and the first {self.sinks}" if self.sinks else "")

    def tinted(self, colour: Colour) -> Colour:
        """Blue, darker for wider windows."""
        return 30, 110, max(120, 250 - self.window // 20)

    def head_rule(self, decode: bool) -> Mapping[str, Any]:
        """A window with sinks."""
        return {"window": self.window, "sinks": self.sinks}

    def structure(self, call: AttentionCall) -> MaskStructure:
        """The call's structure with this window, never wider than the model's own."""
        structure = call.structure
        if structure.window is None:
            return structure.with_changes(window=self.window, sinks=self.sinks)
        return structure if self.idle_beside(structure.window) else structure.with_changes(window=self.window)

    def rows_with_fewer_keys(self, first: int, stop: int, kv_len: int, causal: bool) -> int:
        """Rows beyond the window and its sinks; both ways, those too whose window ends before the sequence does."""
        left = max(stop - max(first, self.window + self.sinks), 0)
        if causal:
            return left
        right = max(min(stop, kv_len - self.window) - first, 0)
        both = max(min(stop, kv_len - self.window) - max(first, self.window + self.sinks), 0)
        return left + right - both

    def idle_beside(self, window: int) -> bool:
        """A window that is not narrower than the layer's own changes nothing."""
        return self.window >= window

    @classmethod
    def candidates(cls, setting: Setting) -> Sequence[Self]:
        """Windows that leave out enough of the scores to save more than their launch costs.

        A causal window of five eighths of the sequence leaves out a seventh, one that looks both ways of three eighths
        a quarter. A cache is worth a quarter of its tokens, which costs no launch that decoding over it would not have.
        """
        length = setting.length
        longest = 3 * length // 4 - SINKS
        widest = longest if setting.memory else 5 * length // 8 if setting.causal else longest // 2
        return [cls(window, SINKS) for window in setting.windows if window <= widest]
