"""The attention layers of a model, the choices of their heads, and what is measured of them.

Pass zero runs one sequence of each length with exact attention. It gives the mean keys and Gram matrices that int8 and
ranks need, and the attention calls that are timed for the prices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaattn_hf import __version__
from adaattn_hf.eval.arms import exact_tap, layer_of
from adaattn_hf.patches.plans.configured import computes_by
from adaattn_hf.patches.plans.hashes import model_hash, weight_hash
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.patches.plans.parts import module_dtype

from ..attention.call import AttentionCall
from ..attention.listeners import tapping
from ..plans.bound_layer import BoundLayer
from ..plans.choices import EXACT, Choice, Setting
from ..plans.plan import PLAN_FORMAT, LayerPlan, Plan
from ..plans.tensors import LayerTensors
from ..policy.candidates import FAMILIES, Candidates, candidates, offered
from ..policy.knapsack import Array, Launches, SolverTable, of_units, shared_prices
from ..policy.prices import PriceTable
from ..stats.spectrum import Gram, gram, score_factors
from .inputs import Inputs
from .state import CalibrationState

Picks = NDArray[np.int64]
"""`[units]`, index of each unit's choice among the candidates."""
FASTER = 0.95
"""A decode step is faster if it takes less than this share of exact attention's time: timings differ by as much, and
a difference counts once for every token."""


@dataclass(frozen=True, eq=False)
class Layers:
    """The attention layers of a model, by ascending index, and a plan that leaves all of them exact."""

    exact: Plan
    indices: tuple[int, ...]
    kv_heads: int
    windows: Mapping[int, int | None]  # the model's own
    candidates: Candidates  # of each unit, a key/value head of a layer
    tensors: Mapping[int, LayerTensors]  # mean keys and bases
    calls: Mapping[int | None, Mapping[int, AttentionCall]]  # by kind (see `kinds`) and length, for timing

    @property
    def units(self) -> list[tuple[int, int]]:
        """Layer and key/value head of each unit."""
        return [(layer, head) for layer in self.indices for head in range(self.kv_heads)]

    @property
    def kinds(self) -> dict[int, int | None]:
        """By layer: its window if layers with that window are priced separately, else `None`."""
        return {layer: window if window in self.calls else None for layer, window in self.windows.items()}


def observe_layers(inputs: Inputs) -> Layers:
    """Runs one sequence of each length; returns the layers, or refuses them if plans or the scoring do not fit them."""
    moments, windows, directions = dict[int, Gram](), dict[int, int | None](), set[bool]()
    calls: dict[int | None, dict[int, AttentionCall]] = {None: {}}
    nearest: dict[int | None, tuple[int, AttentionCall]] = {}  # by window, the call nearest to the middle of the model
    place, middle = 0, len(inputs.arms.attentions) // 2

    def tap(module: nn.Module, call: AttentionCall) -> Tensor:
        nonlocal place
        index, window = layer_of(module, call), call.structure.window
        of_call = gram(call.query.detach(), call.key.detach())
        moments[index] = moments[index] + of_call if index in moments else of_call
        windows[index] = window
        directions.add(call.structure.causal)
        distance, place = abs(place - middle), place + 1
        if window not in nearest or distance < nearest[window][0]:
            nearest[window] = distance, call
        return exact_tap(module, call)

    for number, length in enumerate(sorted(inputs.samples)):
        inputs.run.progress("moments", number, len(inputs.samples))
        place = 0
        nearest.clear()
        with torch.no_grad(), tapping(tap):
            inputs.arms.hidden(inputs.windows(inputs.samples[length]["risk"][0])[0])
        if not nearest:
            raise ValueError("the model made no attention call through adaattn; it may not use the attention interface")
        # the main kind of layer is that without a window, or else the nearest one
        main, *others = sorted(nearest, key=lambda window: (window is not None, nearest[window][0]))
        calls[None][length] = nearest[main][1]
        for window in others:
            calls.setdefault(window, {})[length] = nearest[window][1]
    inputs.run.progress("moments", len(inputs.samples), len(inputs.samples))
    if directions != {(scoring := inputs.scoring).causal}:
        kinds = sorted("causal" if causal else "bidirectional" for causal in directions)
        raise ValueError(
            f"scoring: {type(scoring).__name__} is for {'causal' if scoring.causal else 'bidirectional'} attention, "
            f"this model's is {' and '.join(kinds)}; calibrate a masked-language model with "
            "scoring=MaskedTokens.of(tokenizer), a causal one with the default"
        )
    indices = tuple(sorted(moments))
    kv_heads, head_dims = ({of_layer.key.shape[dim] for of_layer in moments.values()} for dim in (0, 2))
    if len(kv_heads) != 1:
        raise ValueError(f"layers have {sorted(kv_heads)} key/value heads; plans serve models with one number of them")
    exact = exact_plan(inputs.arms.model, indices)
    offers = offered_choices(inputs, exact.dtype, min(head_dims))
    columns, tensors = max(choice.columns for choice in offers.choices), dict[int, LayerTensors]()
    for index in indices:
        bases = score_factors(moments[index].centred(), columns) if columns else ()
        by_head = ({head: matrix.float() for head, matrix in enumerate(basis)} for basis in bases)
        tensors[index] = LayerTensors(moments[index].key_mean.float(), *by_head)
    return Layers(exact, indices, kv_heads.pop(), windows, offers, tensors, calls)


def offered_choices(inputs: Inputs, dtype: str, head_dim: int) -> Candidates:
    """Returns the choices that the settings offer to heads of a size in a dtype; a ValueError if only the exact one."""
    s, device = inputs.settings, inputs.arms.device.type
    families, longest = offered(s.families, device == "cuda"), s.lengths[-1]
    windows_alone = s.aim != "prompt"  # a step reads keys once, and rounds none
    setting = Setting(longest, head_dim, dtype, families, s.windows, inputs.scoring.causal, windows_alone)
    if len((offers := candidates(setting)).choices) == 1:
        more = [name for name in FAMILIES if name not in s.families]
        raise ValueError(
            f"families is {','.join(s.families)}, which offer no choice for {longest} tokens in {dtype}: windows need "
            "more tokens, and lower precision means fewer bits than the model's own; give longer lengths (--lengths "
            f"{8 * longest})" + (f", or other families ({','.join(more)})" if more else "")
        )
    return offers


def exact_plan(model: nn.Module, indices: Sequence[int]) -> Plan:
    """Returns the plan of these layers that leaves each exact: all others are made from it."""
    _, first = next(attention_modules(model), (0, None))
    if first is None:
        raise ValueError("the model has no attention modules with a layer_idx; a plan could not name its layers")
    config: Any = first.config
    modules = dict(attention_modules(model, config.model_type))
    return Plan(
        format=PLAN_FORMAT, model_type=str(config.model_type), weight_hash=model_hash(model),
        configuration=computes_by(config), dtype=module_dtype(modules[indices[0]]),
        adaattn=__version__, torch=torch.__version__, transformers=version("transformers"),
        budget=0.0, seed=0, data_fingerprint="", protocol={}, lengths=(), units=(), verified=None, tensors="",
        layers=tuple(LayerPlan(index, weight_hash(modules[index]), (EXACT,)) for index in indices),
        attention_layers=tuple(indices),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Measurement:
    """Layers, risks and prices (`[units, choices]`, seconds of what the plan is for) of one model."""

    inputs: Inputs
    layers: Layers
    state: CalibrationState
    table: PriceTable
    prices: Array
    launches: Launches
    rounding: float = 0.0  # mean KL of two exact implementations, nats/token

    def risks(self, alpha: Array | float = 1.0) -> Array:
        """Returns the risks `[lengths, units, choices]` in nats/token, re-scaled by factors `alpha` `[lengths]`."""
        means = [self.state.mean(length) for length in self.inputs.settings.lengths]
        return np.asarray(np.stack(means) * np.reshape(alpha, (-1, 1, 1)))

    @property
    def kept_tokens(self) -> NDArray[np.int64]:
        """Tokens of the longest sequence that a streaming head keeps, `[units, choices]`.

        Layers with a window of their own keep that, whatever the plan says.
        """
        layers, length = self.layers, max(self.inputs.settings.lengths)
        spans = [choice.span for choice in layers.candidates.choices]
        windows = [layers.windows[layer] for layer, _ in layers.units]
        most = [length if window is None else min(length, window - 1) for window in windows]
        return np.array(
            [
                [all_ if span is None or window is not None else min(all_, sum(span)) for span in spans]
                for all_, window in zip(most, windows, strict=True)
            ]
        )

    def solver(self, alpha: Array | float = 1.0) -> SolverTable:
        """Returns what the solver chooses from, the risks re-scaled by the factors `alpha` `[lengths]`."""
        layers, labels = self.layers, [choice.label for choice in self.layers.candidates.choices]
        kept = self.kept_tokens if self.inputs.scoring.generates else None
        return SolverTable(layers.units, labels, self.prices, self.risks(alpha), self.launches, kept)


def make_plan(measurement: Measurement, picks: NDArray[np.int64]) -> Plan:
    """Returns the plan of an allocation `picks` `[units]` as a search tries it: without proof, records and tensors."""
    facts, settings = measurement.layers, measurement.inputs.settings
    layers = [
        replace(layer, choices=tuple(facts.candidates.choices[pick] for pick in layer_picks))
        for layer, layer_picks in zip(facts.exact.layers, picks.reshape(-1, facts.kv_heads), strict=True)
    ]
    planned, text = tuple(layer for layer in layers if not layer.is_exact), measurement.inputs.fingerprint
    drawn = replace(facts.exact, seed=settings.seed, data_fingerprint=text, lengths=settings.lengths)
    return replace(drawn, budget=settings.budget, layers=planned)


def bound_layers(measurement: Measurement, plan: Plan) -> dict[int, BoundLayer]:
    """Returns what the layers of a plan run, by index; exact ones are absent."""
    planned, tensors = [layer for layer in plan.layers if not layer.is_exact], measurement.layers.tensors
    return {
        layer.layer: BoundLayer(layer, tensors[layer.layer], plan.max_length, exact_steps=plan.exact_steps)
        for layer in planned
    }


def picks_of(measurement: Measurement, plan: Plan) -> Picks:
    """Returns the index of each unit's choice in a plan among the candidates."""
    candidates = measurement.layers.candidates.choices
    exact = (candidates[0],) * measurement.layers.kv_heads
    by_layer = {layer.layer: layer.choices for layer in plan.layers}
    chosen = [choice for index in measurement.layers.indices for choice in by_layer.get(index, exact)]
    return np.array([candidates.index(choice) for choice in chosen], dtype=np.int64)


def launch_label(choice: Choice, window: int | None) -> str:
    """Returns the name of a choice's price in layers with that window, None for the main kind of layer."""
    return choice.label if window is None else f"{choice.label} in {window}"


def unit_prices(table: PriceTable, layers: Layers, lengths: Sequence[int], phase: str) -> tuple[Array, Launches]:
    """Returns prices `[units, choices]` in seconds, summed over one call of a phase at each length, and its launches.

    A choice that changes nothing in a layer with a window of its own has an infinite price there.
    """
    choices = layers.candidates.choices
    labels = [[launch_label(choice, layers.kinds[layer]) for choice in choices] for layer, _ in layers.units]
    names = [table.launch_of.get(choice.label, choice.label) for choice in choices]
    calls = {(phase, length): 1.0 for length in lengths}
    prices, launches = of_units(table, calls, labels, names, [layer for layer, _ in layers.units])
    idle = [[choice.beside_window(layers.windows[layer]) != choice for choice in choices] for layer, _ in layers.units]
    prices[np.array(idle)] = np.inf
    return prices, launches


def steps_stay_exact(table: PriceTable, layers: Layers, lengths: Sequence[int], picks: Picks) -> bool:
    """Returns whether decode steps are not measurably faster by an allocation than exact, so that they stay exact.

    This happens for short rows on a GPU, where a step takes as long as its launch.
    """
    steps = unit_prices(table, layers, lengths, "decode")
    planned, exact = (float(shared_prices(one, *steps).sum()) for one in (picks, np.zeros_like(picks)))
    return planned >= FASTER * exact
