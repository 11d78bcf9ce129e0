"""Measured latency of a plan's kernel launches, interpolated between the measured lengths and head counts.

A launch computes all heads of a layer that share a launch group. Its latency is modelled as constant + slope * heads,
fitted on this machine at a few lengths and interpolated linearly in log-log space between them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_NO_TABLE = (
    "the prices file is not a table of prices of this version ({}); expected the keys launch_of, machine and prices: "
    "leave --prices out to measure them"
)


@dataclass(frozen=True)
class Price:
    """Latency of one launch: `constant + slope * heads`, in seconds and seconds per key/value head.

    Numbers below 0, infinite ones, and two zeros are refused.
    """

    constant: float
    slope: float

    def __post_init__(self) -> None:
        if not (0.0 <= self.constant < math.inf and 0.0 <= self.slope < math.inf and self.constant + self.slope):
            raise ValueError(
                f"prices: got a constant of {self.constant} and a slope of {self.slope} seconds, expected numbers of "
                "at least 0, one of them above; measure the prices again"
            )


@dataclass(frozen=True)
class PriceTable:
    """Measured latencies by phase, length and launch.

    Attributes:
        machine: The machine they were measured on, in words.
        launch_of: Maps a choice's label to the name of its launch; choices with one launch share its fixed cost (see
            `execute.launch_names`). A choice that is missing here has a launch of its own, by its label.
        prices: `prices[phase][length][launch]`; phases are `prefill` and `decode`, launches are choice labels.
    """

    machine: str
    launch_of: Mapping[str, str]
    prices: Mapping[str, Mapping[int, Mapping[str, Price]]]

    def price(self, phase: str, length: int, launch: str) -> Price:
        """Returns the price at a length, interpolated; beyond the measured lengths the last slope continues.

        A phase or a launch that was never measured is a KeyError.
        """
        points = [(size, row[launch]) for size, row in sorted(self.prices[phase].items()) if launch in row]
        if not points:
            raise KeyError(f"launch {launch!r} has no {phase} price; measured: {sorted(self.launches(phase))}")
        if len(points) == 1:
            return points[0][1]
        upper = max(next((i for i, (size, _) in enumerate(points) if size >= length), len(points) - 1), 1)
        (n0, low), (n1, high) = points[upper - 1], points[upper]
        share = (math.log(length) - math.log(n0)) / (math.log(n1) - math.log(n0))

        def between(low: float, high: float) -> float:
            if low > 0.0 and high > 0.0:
                return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
            return max(low + min(max(share, 0.0), 1.0) * (high - low), 0.0)

        return Price(between(low.constant, high.constant), between(low.slope, high.slope))

    def launches(self, phase: str) -> set[str]:
        """Returns the launches measured in a phase."""
        return {launch for row in self.prices[phase].values() for launch in row}

    def to_json(self) -> str:
        """Returns the table as JSON."""
        prices = {
            phase: {
                str(length): {name: [p.constant, p.slope] for name, p in row.items()} for length, row in table.items()
            }
            for phase, table in self.prices.items()
        }
        words = {"machine": self.machine, "prices": prices, "launch_of": dict(self.launch_of)}
        return json.dumps(words, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the table written by `to_json`; other text is a ValueError."""
        try:
            data: Any = json.loads(text)
            if not isinstance(data, dict) or set(data) != {"launch_of", "machine", "prices"}:
                raise ValueError(_NO_TABLE.format("other keys"))
            prices = {
                phase: {
                    int(length): {name: Price(*map(float, pair)) for name, pair in row.items()}
                    for length, row in table.items()
                }
                for phase, table in data["prices"].items()
            }
            launch_of = {str(label): str(name) for label, name in data["launch_of"].items()}
        except (AttributeError, OverflowError, RecursionError, TypeError) as error:
            raise ValueError(_NO_TABLE.format(error)) from error
        if not all(table and min(table) > 0 and all(table.values()) for table in prices.values()):
            raise ValueError(_NO_TABLE.format("a phase or a length without prices, or one below 1 token"))
        return cls(str(data["machine"]), launch_of, prices)
