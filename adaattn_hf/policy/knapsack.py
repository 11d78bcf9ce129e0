"""Solves the multiple-choice knapsack: the cheapest choice per unit whose summed risk fits every length bin's budget.

    minimise    sum_u price[u, x_u] + sum over calls, layers, launches of the largest constant among the units' choices
    subject to  sum_u risk[b, u, x_u] <= budget[b]   for every length bin b

It is a mixed-integer linear program, solved by HiGHS (`scipy.optimize.milp`) to an optimality gap that it guarantees.
The table of prices and risks is kept with a plan, so that a calibration can be solved again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import bmat, coo_array, identity, kron

from .prices import PriceTable
from .silence import silenced

Array = NDArray[np.float64]

GAP, CACHE_GAP = 1e-4, 1e-3
"""Optimality gaps at which the solver may stop: the last tokens of a cache may take minutes."""
ROUNDING = 1e-9
"""Share of a layer's price that rounding may differ by."""


@dataclass(frozen=True)
class Launches:
    """Fixed costs of launches: in a call a layer pays once per launch, for its choice that makes the launch dearest.

    A call is a prefill of one length, or all decode steps after it.

    Attributes:
        layer: `[units]`, the layer of each unit.
        launch: `[choices]`, the launch group of each choice.
        constant: `[calls, units, choices]`, seconds of a launch that has a unit with this choice, however many.
    """

    layer: NDArray[np.int64]
    launch: NDArray[np.int64]
    constant: Array

    @classmethod
    def free(cls, units: int, choices: int) -> Self:
        """Returns launches that cost nothing: every unit stands for itself."""
        return cls(np.arange(units), np.zeros(choices, dtype=np.int64), np.zeros((0, units, choices)))


def of_units(
    table: PriceTable,
    calls: Mapping[tuple[str, int], float],
    labels: Sequence[Sequence[str]],
    names: Sequence[str],
    layers: Sequence[int],
) -> tuple[Array, Launches]:
    """Returns the prices `[units, choices]` that measured lines add up to, and their launches.

    Wherever a plan's time is told, it is this: a launch takes the largest constant among its heads' choices and the sum
    of their slopes, at each length and phase by itself. `calls` counts those of a phase and length; prices are named by
    `labels` `[units][choices]`, launches by `names` `[choices]`.
    """
    kinds = list(dict.fromkeys(map(tuple, labels)))
    of_unit = [kinds.index(tuple(unit_labels)) for unit_labels in labels]
    lines = [[[table.price(*call, name) for name in kind] for kind in kinds] for call in calls]
    weights = np.array(list(calls.values()))[:, None, None]
    slopes = np.array([[[line.slope for line in kind] for kind in call] for call in lines]) * weights
    constants = np.array([[[line.constant for line in kind] for kind in call] for call in lines]) * weights
    groups = list(dict.fromkeys(names))
    launch = np.array([groups.index(name) for name in names])
    return slopes.sum(axis=0)[of_unit], Launches(np.array(layers), launch, constants[:, of_unit])


@dataclass(frozen=True)
class Allocation:
    """The choice picked for each of `[units]`, with their total price, launches counted, and total risk `[bins]`."""

    picks: NDArray[np.int64]
    price: float
    risk: Array


def evaluate(picks: NDArray[np.int64], prices: Array, risks: Array, launches: Launches) -> Allocation:
    """Returns the total price and risk of these picks."""
    price = float(shared_prices(picks, prices, launches).sum())
    return Allocation(picks, price, risks[:, np.arange(len(picks)), picks].sum(axis=1))


def shared_prices(picks: NDArray[np.int64], prices: Array, launches: Launches) -> Array:
    """Returns the price `[units]` of these picks; the units of a launch share its constant cost."""
    units = np.arange(len(picks))
    keys = np.stack([launches.layer, launches.launch[picks]])
    together = (keys[:, :, None] == keys[:, None, :]).all(axis=0)
    dearest = np.where(together, launches.constant[:, units, picks][:, None], 0.0).max(axis=2).sum(axis=0)
    return np.asarray(prices[units, picks] + dearest / together.sum(axis=1))


def of_cache(kept: NDArray[np.int64]) -> Array:
    """Returns prices `[units, choices]` of a search for the smallest cache: the tokens kept, if fewer than by exact."""
    saves = kept < kept[:, :1]
    saves[:, 0] = True
    return np.where(saves, kept.astype(np.float64), np.inf)


def worst_length(risks: Array, picks: NDArray[np.int64]) -> Array:
    """Returns the risk `[units]` of given picks at the length where their sum is largest."""
    chosen = risks[:, np.arange(len(picks)), picks]
    return np.asarray(chosen[chosen.sum(axis=1).argmax()])


def allocate(
    prices: Array, risks: Array, budget: Array, launches: Launches | None = None, gap: float = GAP
) -> Allocation:
    """Returns the cheapest allocation inside the budget; layers that it would not make cheaper are exact.

    The first choice is the exact one, without risk; infinite prices and risks `[bins, units, choices]` (nats/token)
    forbid a choice, an infinite budget `[bins]` allows all finite risks. The solver may stop at the relative `gap`.
    """
    units, choices = prices.shape
    allowed = np.isfinite(prices) & np.isfinite(risks).all(axis=0)
    if not (allowed[:, 0].all() and (risks[:, :, 0] == 0.0).all()):
        raise ValueError(
            "a unit's first choice has a risk or no price, expected the exact one, without risk and with a price"
        )
    # what exceeds a budget by itself is in no plan; in units of a tiny budget its risk is beyond the solver's numbers
    allowed &= (np.where(np.isfinite(risks), risks, np.inf) <= budget[:, None, None]).all(axis=0)
    launches = launches or Launches.free(units, choices)
    # by call, layer and launch, whose largest constant is a variable of its own: the units that pay it
    groups = np.unique(launches.launch)
    by_launch = np.where(launches.launch == groups[:, None, None], launches.constant[:, None], 0.0)
    call, group, unit = np.nonzero(by_launch.any(axis=-1))
    kinds, paid = np.unique(np.stack([call, launches.layer[unit], group]), axis=1, return_inverse=True)
    order = np.argsort(paid.ravel(), kind="stable")
    unit, paid, constants = unit[order], paid.ravel()[order], by_launch[call, group, unit][order]
    items, rows = units * choices, np.arange(len(unit))
    # in units of the largest price that there is, of a head or of a launch, prices stay clear of them, too
    scale = max(float(prices[allowed].max()), float(constants.max(initial=0.0))) or 1.0
    cost = np.concatenate([np.where(allowed, prices, 0.0).ravel() / scale, np.ones(kinds.shape[1])])
    # Risks are of the order 1e-6: in units of the budget they stay clear of the solver's tolerances.
    unit_of_risk = np.where((budget > 0) & np.isfinite(budget), budget, 1.0)
    risk = np.where(allowed, risks, 0.0).reshape(len(budget), items) / unit_of_risk[:, None]
    of_unit = (unit[:, None] * choices + np.arange(choices)).ravel()
    charged = coo_array(((constants / scale).ravel(), (rows.repeat(choices), of_unit)), shape=(len(unit), items))
    charged.eliminate_zeros()
    largest = coo_array((-np.ones(len(unit)), (rows, paid)), shape=(len(unit), kinds.shape[1]))
    choose_one = kron(identity(units), np.ones((1, choices)))
    matrix = bmat([[choose_one, None], [coo_array(risk), None], [charged, largest]], format="csr")
    low = np.concatenate([np.ones(units), np.full(len(budget) + len(unit), -np.inf)])
    high = np.concatenate([np.ones(units), budget / unit_of_risk, np.zeros(len(unit))])
    upper = np.concatenate([allowed.ravel().astype(float), np.full(kinds.shape[1], np.inf)])
    with silenced():
        answer = milp(
            cost,
            integrality=np.concatenate([np.ones(items), np.zeros(kinds.shape[1])]),
            bounds=Bounds(np.zeros_like(cost), upper),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": gap, "node_limit": 20000},
        )
    if answer.x is None:
        raise ValueError(f"the solver found no allocation: {answer.message}")
    picks = answer.x[:items].reshape(units, choices).argmax(axis=1).astype(np.int64)
    return repair(picks, prices, risks, budget, launches)


def repair(picks: NDArray[np.int64], prices: Array, risks: Array, budget: Array, launches: Launches) -> Allocation:
    """Returns the picks with the riskiest units made exact until no budget is exceeded by the solver's tolerance."""
    picks = picks.copy()
    units = np.arange(len(picks))
    while True:
        over = risks[:, units, picks].sum(axis=1) - budget
        if (over <= 0).all():
            return evaluate(saving(picks, prices, launches), prices, risks, launches)
        worst = int(np.argmax(over))
        chosen = risks[worst, units, picks]
        enough = np.flatnonzero(chosen >= over[worst])
        unit = int(enough[np.argmin(chosen[enough])]) if len(enough) else int(np.argmax(chosen))
        picks[unit] = 0


def saving(picks: NDArray[np.int64], prices: Array, launches: Launches) -> NDArray[np.int64]:
    """Returns the picks with every layer exact that is not cheaper than exact, so that the whole is, or is exact.

    The solver stops at a gap, takes either of two equal prices, and `repair` leaves launches that few units share.
    """
    planned, exact = (shared_prices(one, prices, launches) for one in (picks, np.zeros_like(picks)))
    layers, of_unit = np.unique(launches.layer, return_inverse=True)
    by_plan, by_exact = (np.bincount(of_unit, price, len(layers)) for price in (planned, exact))
    return np.where((by_plan < by_exact * (1.0 - ROUNDING))[of_unit], picks, 0)


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
        """The table as lists and numbers; infinite ones stay so: `json_text` writes null, which `from_dict` reads."""
        constant, kind = np.unique(self.launches.constant, axis=1, return_inverse=True)
        return {
            "units": [list(unit) for unit in self.units],
            "choices": list(self.choices),
            "prices": self.prices.tolist(),
            "risks": self.risks.tolist(),
            "launch": self.launches.launch.tolist(),
            "kind": kind.ravel().tolist(),
            "constant": constant.tolist(),
            "kept": None if self.kept is None else self.kept.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads a table written by `to_dict`; another one, or one whose shapes disagree, is a ValueError."""
        try:
            units = [(int(layer), int(head)) for layer, head in data["units"]]
            choices = [str(name) for name in data["choices"]]
            prices, risks = _infinite(data["prices"]), _infinite(data["risks"])
            launch = np.array(data["launch"], dtype=np.int64)
            constant = np.array(data["constant"], dtype=float)
            constant = constant[:, np.array(data["kind"], dtype=np.int64)]
            kept = None if data["kept"] is None else np.array(data["kept"], dtype=np.int64)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
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


def _infinite(values: Any) -> Array:
    return np.asarray(np.nan_to_num(np.array(values, dtype=float), nan=np.inf, posinf=np.inf))
