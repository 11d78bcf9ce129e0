"""The front pages' picture of two plans: the window of every key/value head, as an SVG without a library."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["draw"]

WIDTH, LEFT, TOP, ROW, GAP = 900, 74, 50, 24, 34
ALL_KEYS, WIDEST, NARROWEST = (224, 228, 232), (198, 219, 239), (8, 48, 107)
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.quiet { fill: #59636e; font-size: 12px }
.title { font-weight: 600; font-size: 15px }
.cell { font-size: 10px; text-anchor: middle; fill: #1f2328 }
.cell.light { fill: #ffffff }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .quiet { fill: #9198a1 } }
"""


def draw(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """The plans as SVG text, one grid under another.

    Args:
        records: Seeds of the study of budgets: `picks` by layer and key/value head, `kv_heads`, `budget` and `report`.
        title: The heading.
    """
    heads = int(records[0]["kv_heads"])
    layers = len(records[0]["picks"]) // heads
    widths = sorted({window for record in records for window in map(_window, record["picks"]) if window})
    cell = (WIDTH - LEFT) / layers
    height = TOP + len(records) * (heads * ROW + GAP) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="18">{escape(title)}</text>',
        f'<text class="quiet" x="0" y="38">number: keys that the head reads, beside the first 16; grey: all keys; '
        f"across: layers 0 to {layers - 1}, down: key/value heads</text>",
    ]
    for place, record in enumerate(records):
        top = TOP + place * (heads * ROW + GAP)
        allowed = f"{100 * math.expm1(record['budget']):.3g} %"
        lines.append(f'<text x="0" y="{top + heads * ROW / 2 + 4}">{allowed}</text>')
        for unit, label in enumerate(record["picks"]):
            layer, head = divmod(unit, heads)
            window = _window(label)
            x, y = LEFT + layer * cell, top + head * ROW
            red, green, blue = colour = _colour(window, widths)
            size = f'width="{cell - 2:.1f}" height="{ROW - 2}"'
            lines.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="rgb({red},{green},{blue})"/>')
            if window:
                kind = "cell light" if sum(colour) < 3 * 128 else "cell"
                lines.append(f'<text class="{kind}" x="{x + cell / 2 - 1:.1f}" y="{y + 15}">{window}</text>')
        worst = max(record["report"]["verdicts"], key=lambda verdict: verdict["upper"])
        lines.append(
            f'<text class="quiet" x="{LEFT}" y="{top + heads * ROW + 14}">proved on held-out text: loss at most '
            f"{worst['upper']:.2e} nats/token above exact, allowed {record['budget']:.2e}</text>"
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _window(label: str) -> int:
    """Keys that a choice reads beside the first ones; 0 is all."""
    found = re.match(r"w(\d+)\+", label)
    return int(found.group(1)) if found else 0


def _colour(window: int, widths: Sequence[int]) -> tuple[int, int, int]:
    """Darker is narrower, which is what eyes of any colour vision see."""
    if not window:
        return ALL_KEYS
    low, high = math.log(widths[0]), math.log(widths[-1])
    share = (high - math.log(window)) / max(high - low, 1e-9)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(WIDEST, NARROWEST, strict=True))
    return red, green, blue
