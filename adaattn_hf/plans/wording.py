"""How names, figures and choices are written for a reader: the same in terminals, pages and stored sentences."""

import math
import re
from collections.abc import Iterable

from .choices import Choice

_NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
ENDLESS = 700.0
"""More nats than this are a perplexity beyond the largest float."""


def rise(nats: float | None) -> str:
    """Returns what a difference of nats/token does to the perplexity, to two digits: `+0.51 %`."""
    return _percent(_relative(nats))


def at_most(nats: float | None) -> str:
    """Returns an upper bound as a rise of the perplexity, rounded up: never less than was measured."""
    return _percent(_relative(nats), up=True)


def allowed(nats: float) -> str:
    """Returns a budget as it is asked for: `+0.1 %`."""
    relative = _relative(nats)
    return f"{relative:+.3g} %" if 1e-4 <= relative < 1e3 else _percent(relative)


def in_nats(value: float, digits: int = 2) -> str:
    """Returns nats, or another small number, as pages write it: `5.05e-3`."""
    if value == 0.0:
        return "0"
    mantissa, _, power = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(power)}" if power else mantissa


def signed_nats(value: float, digits: int = 2) -> str:
    """Returns the same with its sign: `+5.05e-3`."""
    return f"{'' if value < 0.0 else '+'}{in_nats(value, digits)}"


def share(value: float, digits: int = 0) -> str:
    """Returns a share in percent: `57 %`."""
    return f"{100.0 * value:.{digits}f} %"


def times(ratio: float | None) -> str:
    """Returns how many times as fast something is: `1.29`."""
    return "unknown" if ratio is None else f"{ratio:.2f}"


def quotient(whole: Iterable[float], part: Iterable[float]) -> float | None:
    """Returns the sum of some figures over that of others, None where the floats of this machine cannot say it."""
    above, below = list(whole), list(part)
    largest = max([*above, *below], default=0.0)
    if not 0.0 < largest < math.inf:
        return None
    numerator, denominator = (sum(value / largest for value in values) for values in (above, below))
    ratio = numerator / denominator if denominator > 0.0 else math.inf
    return ratio if math.isfinite(ratio) else None


def counted(number: int, noun: str) -> str:
    """Returns a small number in words: `two sources`."""
    words = _NUMBERS[number] if number < len(_NUMBERS) else f"{number:,}"
    return f"{words} {noun}{'' if number == 1 else 's'}"


def legend(choices: Iterable[Choice]) -> str:
    """Returns what the labels of these choices mean, one of each kind; empty where all are exact."""
    kinds: dict[str, str] = {}
    for part in (part for choice in choices for part in choice.parts):
        # w128+16 says how to read w256+16
        kinds.setdefault(re.sub(r"[0-9.]+", "", part.label), f"{part.label}: {part.meaning}")
    return "; ".join(kinds.values())


def _relative(nats: float | None) -> float:
    if nats is None:
        return math.nan
    return math.inf if nats >= ENDLESS else 100.0 * math.expm1(nats)


def _percent(value: float, up: bool = False) -> str:
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "without bound"
    if value == 0.0:
        return "+0 %"
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size < 6:
        return f"{signed_nats(value, 1)} %"
    digits = max(0, 1 - size)
    # what was written with so many digits lies a bit above them after its logarithm and back again
    shown = math.ceil(value * 10.0**digits - 1e-6) / 10.0**digits if up else value
    return f"{shown:+.{digits}f} %"
