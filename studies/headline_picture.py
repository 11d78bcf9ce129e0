"""The README's pictures as SVG without a library: the speedup over stock, and the badges.

Bars start at zero, with a mark at stock's speed. Each label is above its bar, so that a phone shows it large enough.
The two colours differ for readers with any colour vision, in light and dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "badge", "draw"]

WIDTH, ROW, TOP, BOTTOM, RIGHT = 520, 40, 50, 16, 48
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.quiet { fill: #59636e; font-size: 12.5px }
.title { font-weight: 600; font-size: 15px }
.one { stroke: #1f2328; stroke-width: 1.5 }
.gpu { fill: #0072b2 } .cpu { fill: #b35900 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .quiet { fill: #9198a1 } .one { stroke: #f0f6fc }
  .gpu { fill: #56b4e9 } .cpu { fill: #e69f00 }
}
"""


@dataclass(frozen=True)
class Bar:
    """What ran, what it is compared with, where, and the fastest stock arm's time over ours, also as it is written."""

    label: str
    beside: str
    gpu: bool
    ratio: float
    figure: str


def _opened(width: int, height: int, title: str, style: str) -> list[str]:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    first = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return [first, f"<title>{escape(title)}</title>", f"<style>{style}</style>"]


def draw(bars: Sequence[Bar], title: str) -> str:
    """The bars as SVG text, in their order."""
    height = TOP + ROW * len(bars) + BOTTOM
    unit = (WIDTH - RIGHT) / max(bar.ratio for bar in bars)
    lines = _opened(WIDTH, height, title, STYLE)
    lines.append(f'<text class="title" x="0" y="16">{escape(title)}</text>')
    for x, kind, said in ((0, "gpu", "GPU"), (60, "cpu", "CPU")):
        lines.append(f'<rect class="{kind}" x="{x}" y="27" width="11" height="11"/>')
        lines.append(f'<text class="quiet" x="{x + 17}" y="37">{said}</text>')
    for row, bar in enumerate(bars):
        y, long = TOP + row * ROW, unit * bar.ratio
        lines += [
            f'<text x="0" y="{y + 14}">{escape(bar.label)}</text>',
            f'<text class="quiet" x="{WIDTH}" y="{y + 14}" text-anchor="end">{escape(bar.beside)}</text>',
            f'<rect class="{"gpu" if bar.gpu else "cpu"}" x="0" y="{y + 20}" width="{long:.1f}" height="12"/>',
            f'<line class="one" x1="{unit:.1f}" x2="{unit:.1f}" y1="{y + 17}" y2="{y + 35}"/>',
            f'<text x="{max(long, unit) + 6:.1f}" y="{y + 31}">{bar.figure}</text>',
        ]
    middle = f'x="{unit:.1f}" y="{height - 5}" text-anchor="middle"'
    return "\n".join([*lines, f'<text class="quiet" {middle}>1: the fastest of stock</text></svg>\n'])


def badge(name: str, value: str) -> str:
    """A name and what it is, as SVG text; each by itself, so that a phone breaks the line between them."""
    left, right = (round(6.6 * len(text)) + 14 for text in (name, value))
    style = "text { font: 12px system-ui, sans-serif; fill: #ffffff; text-anchor: middle }"
    return "\n".join([
        *_opened(left + right, 20, f"{name} {value}", style),
        f'<rect width="{left}" height="20" fill="#59636e"/>',
        f'<rect x="{left}" width="{right}" height="20" fill="#0b6e4f"/>',
        f'<text x="{left / 2}" y="14">{escape(name)}</text>',
        f'<text x="{left + right / 2}" y="14">{escape(value)}</text></svg>\n',
    ])  # fmt: skip
