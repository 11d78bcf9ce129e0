"""The table of prices and risks that is kept with a plan, from which a calibration can be solved again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .knapsack import CACHE_GAP, Allocation, Array, Launches, allocate, of_cache


@dataclass(frozen=True, eq=False)
class SolverTable:
    """Prices and risks of all choices, from which the solver chooses.

    Attributes:
        units: Layer and key/value head of each unit, layer by layer.
        choices: Labels of the choices, exact first.
        prices: `[units, choices]`, seconds; infinite where a choice is not offered.
        risks: `[lengths, units, choices]`, nats/token, rescaled to the measured loss of whole plans.
        kept: `[units, choices]`, tokens that a streaming cache keeps of a sequence of the longest length; None where
            the model has no cache.
    """

    units: Sequence[tuple[int, int]]
    choices: Sequence[str]
    prices: Array
    risks: Array
    launches: Launches
    kept: NDArray[np.int64] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values; infinite numbers become null."""
        constant, kind = np.unique(self.launches.constant, axis=1, return_inverse=True)
        return {
            "units": [list(unit) for unit in self.units],
            "choices": list(self.choices),
            "prices": _finite(self.prices),
            "risks": _finite(self.risks),
            "launch": self.launches.launch.tolist(),
            "kind": kind.ravel().tolist(),
            "constant": constant.tolist(),
            "kept": None if self.kept is None else self.kept.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SolverTable:
        """Reads a table written by `to_dict`; another one, or one whose shapes disagree, is a ValueError."""
        try:
            units = [(int(layer), int(head)) for layer, head in data["units"]]
            choices = [str(name) for name in data["choices"]]
            prices, risks = _infinite(data["prices"]), _infinite(data["risks"])
            launch = np.array(data["launch"], dtype=np.int64)
            constant = np.array(data["constant"], dtype=float)
            constant = constant[:, np.array(data["kind"], dtype=np.int64)]
            kept = None if data["kept"] is None else np.array(data["kept"], dtype=np.int64)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"table: not one that `adaattn calibrate` wrote ({error!r}); calibrate again") from error
        shape = (len(units), len(choices))
        if (
            prices.shape != shape
            or risks.shape[1:] != shape
            or launch.shape != shape[1:]
            or constant.shape[1:] != shape
            or not (np.isfinite(constant) & (constant >= 0.0)).all()
            or not (kept is None or (kept.shape == shape and kept[:, 0].all()))
        ):
            raise ValueError(
                f"table: {shape[0]} units and {shape[1]} choices, but prices {prices.shape}, risks {risks.shape}, "
                f"constants {constant.shape}, kept tokens {None if kept is None else kept.shape}; calibrate again"
            )
        layers = np.array([layer for layer, _ in units], dtype=np.int64)
        return cls(units, choices, prices, risks, Launches(layers, launch, constant), kept)

    def solve(
        self, limit: Array | float, smallest: bool = False, more: Sequence[tuple[Array, float]] = ()
    ) -> Allocation:
        """Returns the allocation of a search, for the least time or the smallest cache.

        Its predicted loss is within the limit, nats/token, of all lengths or of each `[lengths]`, and each of `more`
        risks `[units, choices]` within its own.
        """
        bins = len(self.risks)
        risks = np.stack([*self.risks, *(risk for risk, _ in more)])
        limits = np.append(np.broadcast_to(limit, bins), [most for _, most in more])
        if smallest and self.kept is not None:
            found = allocate(of_cache(self.kept), risks, limits, gap=CACHE_GAP)
        else:
            found = allocate(self.prices, risks, limits, self.launches)
        return replace(found, risk=found.risk[:bins])


def _finite(values: Array) -> Any:
    nested = values.astype(object)
    nested[~np.isfinite(values)] = None
    return nested.tolist()


def _infinite(values: Any) -> Array:
    return np.asarray(np.nan_to_num(np.array(values, dtype=float), nan=np.inf, posinf=np.inf))
