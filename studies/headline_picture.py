"""The front pages' picture: how many times as fast as the fastest stock implementation, as an SVG without a library.

Bars on a logarithmic scale, with the quartiles of the rounds as a line and the figure beside every bar; two colours
that readers with any colour vision tell apart, in light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "draw"]

WIDTH, LABEL, ROW, TOP, BOTTOM, RIGHT = 900, 440, 24, 58, 40, 70
LOW, TICKS = 0.8, (1, 2, 5, 10, 20, 50)
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.quiet { fill: #59636e; font-size: 12px }
.title { font-weight: 600; font-size: 15px }
.grid { stroke: #d1d9e0 } .one { stroke: #59636e; stroke-width: 1.5 }
.cpu { fill: #0072b2 } .gpu { fill: #b35900 } .spread { stroke: #1f2328; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .quiet { fill: #9198a1 }
  .grid { stroke: #3d444d } .one { stroke: #9198a1 }
  .cpu { fill: #56b4e9 } .gpu { fill: #e69f00 } .spread { stroke: #f0f6fc }
}
"""


@dataclass(frozen=True)
class Bar:
    """One measured cell.

    Attributes:
        label: What was computed, and its dtype.
        device: Where, for the legend.
        is_gpu: Which of the two colours.
        ratio: Median of stock's time over ours.
        low: Lower quartile of the ratio.
        high: Upper quartile.
    """

    label: str
    device: str
    is_gpu: bool
    ratio: float
    low: float
    high: float


def draw(bars: Sequence[Bar], title: str) -> str:
    """The picture as SVG text."""
    height = TOP + ROW * len(bars) + BOTTOM
    high = max(bar.high for bar in bars)

    def across(ratio: float) -> float:
        share = math.log(max(ratio, LOW) / LOW) / math.log(high / LOW)
        return LABEL + share * (WIDTH - LABEL - RIGHT)

    end = height - BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="18">{escape(title)}</text>',
        *_legend(bars),
    ]
    for tick in TICKS:
        if tick <= high:
            x, kind = across(tick), "one" if tick == 1 else "grid"
            lines.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{end}"/>')
            lines.append(
                f'<text class="quiet" x="{x:.1f}" y="{end + 18}" text-anchor="middle">{tick}×</text>'
            )
    for row, bar in enumerate(bars):
        lines += _bar(bar, TOP + row * ROW, across)
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _legend(bars: Sequence[Bar]) -> list[str]:
    lines, x = [], 0
    for device in dict.fromkeys(bar.device for bar in bars):
        kind = "gpu" if next(bar for bar in bars if bar.device == device).is_gpu else "cpu"
        lines.append(f'<rect class="{kind}" x="{x}" y="28" width="12" height="12"/>')
        lines.append(f'<text class="quiet" x="{x + 18}" y="39">{escape(device)}</text>')
        x += 40 + 7 * len(device)
    lines.append(
        f'<text class="quiet" x="{x}" y="39">1× is the fastest stock implementation; line: quartiles</text>'
    )
    return lines


def _bar(bar: Bar, y: int, place: Callable[[float], float]) -> list[str]:
    start, stop = sorted((place(1), place(bar.ratio)))
    middle = y + ROW / 2 - 3
    kind = "gpu" if bar.is_gpu else "cpu"
    return [
        f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect class="{kind}" x="{start:.1f}" y="{y}" width="{stop - start:.1f}" height="{ROW - 7}"/>',
        f'<line class="spread" x1="{place(bar.low):.1f}" x2="{place(bar.high):.1f}" y1="{middle}" y2="{middle}"/>',
        f'<text x="{max(place(bar.high), stop) + 6:.1f}" y="{middle + 4}">{bar.ratio:.2f}</text>',
    ]
