"""The attention layers of a model, the choices of their heads, and what is measured of them.

Pass zero runs one sequence of each length with exact attention. It gives the mean keys and Gram matrices that int8 and
ranks need, and the attention calls that are timed for the prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaattn_hf.eval.arms import bound_layers_of

from ..attention.call import AttentionCall
from ..attention.listeners import tapping
from ..plans.bound_layer import BoundLayer
from ..plans.choices import Setting
from ..plans.plan import Plan
from ..plans.tensors import LayerTensors
from ..policy.candidates import FAMILIES, Candidates, candidates, offered
from ..policy.knapsack import Array, Launches, of_cache
from ..policy.prices import PriceTable
from ..stats.spectrum import Gram, score_factors
from .inputs import Inputs
from .settings import CalibrationSettings
from .state import CalibrationState, KeptMoments, Moments

Picks = NDArray[np.int64]
"""`[units]`, index of each unit's choice among the candidates."""


@dataclass(frozen=True, eq=False)
class Layers:
    """The attention layers of a model, by ascending index, and a plan that leaves all of them exact.

    `windows` are the model's own. `candidates` are of each unit (a key/value head of a layer), `tensors` mean keys and
    bases. `calls` are by kind and length, for timing; see `kinds`.
    """

    exact: Plan
    indices: tuple[int, ...]
    kv_heads: int
    windows: Mapping[int, int | None]
    candidates: Candidates
    tensors: Mapping[int, LayerTensors]
    calls: Mapping[int | None, Mapping[int, AttentionCall]]

    @property
    def units(self) -> list[tuple[int, int]]:
        """Layer and key/value head of each unit."""
        return [(layer, head) for layer in self.indices for head in range(self.kv_heads)]

    @property
    def kinds(self) -> dict[int, int | None]:
        """By layer: its window if layers with that window are priced separately, else `None`."""
        return {layer: own if own in self.calls else None for layer, own in self.windows.items()}


def observe_layers(inputs: Inputs, kept: KeptMoments | None = None) -> Layers:
    """Runs one sequence of each length; returns the layers, or refuses them if plans or the scoring do not fit them.

    Lengths that are `kept` are not run again.
    """
    moments, by_length = Moments(), dict[int, list[AttentionCall]]()
    if kept is not None:
        moments, by_length = kept.load(inputs.arms.device)
    calls: dict[int | None, dict[int, AttentionCall]] = {None: {}}
    for number, length in enumerate(sorted(inputs.samples)):
        inputs.run.progress("moments", number, len(inputs.samples))
        if length not in by_length:
            by_length[length] = _calls(inputs, moments, length)
            if kept is not None and inputs.team.leads:
                kept.save(moments, by_length)
        calls[None][length], *others = by_length[length]
        for call in others:
            calls.setdefault(call.structure.window, {})[length] = call
    inputs.run.progress("moments", len(inputs.samples), len(inputs.samples))
    _refuse_other_scoring(inputs, moments)
    indices = tuple(sorted(moments.grams))
    kv_heads, head_dims = ({gram.key.shape[dim] for gram in moments.grams.values()} for dim in (0, 2))
    if len(kv_heads) != 1:
        raise ValueError(f"layers have {sorted(kv_heads)} key/value heads; plans serve models with one number of them")
    exact, settings = inputs.subject.exact_plan(indices), inputs.settings
    families = offered(settings.families, inputs.arms.device.type == "cuda")
    causal, memory = inputs.scoring.causal, settings.with_cache
    found = candidates(
        Setting(settings.lengths[-1], min(head_dims), exact.dtype, families, settings.windows, causal, memory)
    )
    refuse_nothing_to_choose(found, settings, exact.dtype)
    return Layers(
        exact=exact,
        indices=indices,
        kv_heads=kv_heads.pop(),
        windows=dict(moments.windows),
        candidates=found,
        tensors={index: _layer_tensors(moments.grams[index], found) for index in indices},
        calls=calls,
    )


def refuse_nothing_to_choose(found: Candidates, settings: CalibrationSettings, dtype: str) -> None:
    """Refuses families that offer nothing but exact attention for these lengths and this dtype."""
    if len(found.choices) == 1:
        longest, others = settings.lengths[-1], [name for name in FAMILIES if name not in settings.families]
        raise ValueError(
            f"families is {','.join(settings.families)}, which offer no choice for {longest} tokens in {dtype}: "
            f"windows need more tokens, and lower precision means fewer bits than the model's own; give longer lengths "
            f"(--lengths {8 * longest})" + (f", or other families ({','.join(others)})" if others else "")
        )


def _calls(inputs: Inputs, moments: Moments, length: int) -> list[AttentionCall]:
    """Runs one sequence, adds up its moments; a call of each window, none first, of the layer nearest to the middle."""
    nearest: dict[int | None, tuple[int, AttentionCall]] = {}
    place, middle = count(), len(inputs.arms.attentions) // 2

    def tap(module: nn.Module, call: AttentionCall) -> Tensor:
        far, own = abs(next(place) - middle), call.structure.window
        if own not in nearest or far < nearest[own][0]:
            nearest[own] = far, call
        return moments.tap(module, call)

    with torch.no_grad(), tapping(tap):
        inputs.arms.hidden(inputs.windows(inputs.samples[length].risk[0])[0])
    if not nearest:
        raise ValueError("the model made no attention call through adaattn; it may not use the attention interface")
    return [nearest[own][1] for own in sorted(nearest, key=lambda own: (own is not None, nearest[own][0]))]


def _refuse_other_scoring(inputs: Inputs, moments: Moments) -> None:
    scoring = inputs.scoring
    if moments.causal == {scoring.causal}:
        return
    kinds = sorted("causal" if causal else "bidirectional" for causal in moments.causal)
    raise ValueError(
        f"scoring: {type(scoring).__name__} is for {'causal' if scoring.causal else 'bidirectional'} attention, this "
        f"model's is {' and '.join(kinds)}; calibrate a masked-language model with scoring=MaskedTokens.of(tokenizer), "
        "a causal one with the default"
    )


def _layer_tensors(gram: Gram, found: Candidates) -> LayerTensors:
    columns = max(choice.columns for choice in found.choices)
    if not columns:
        return LayerTensors(gram.key_mean.float())
    bases = score_factors(gram.centred(), columns)
    return LayerTensors(
        gram.key_mean.float(), *({head: one.float() for head, one in enumerate(basis)} for basis in bases)
    )


@dataclass(frozen=True, eq=False)
class Measurement:
    """Layers, risks and prices (`[units, choices]`, seconds) of one model.

    With `exact_steps` decode steps stay exact (`pricing.steps_stay_exact`), and prices are the prefill's.
    """

    inputs: Inputs
    layers: Layers
    state: CalibrationState
    table: PriceTable
    prices: Array
    launches: Launches
    exact_steps: bool = False

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
        spans, own = [choice.span for choice in layers.candidates.choices], [layers.windows[i] for i, _ in layers.units]
        most = [length if window is None else min(length, window - 1) for window in own]
        return np.array(
            [
                [all_ if span is None or window is not None else min(all_, sum(span)) for span in spans]
                for all_, window in zip(most, own, strict=True)
            ]
        )

    @property
    def costs(self) -> Array:
        """What the search minimises, `[units, choices]`: seconds, or tokens in the cache under `optimize="memory"`."""
        if not self.inputs.settings.with_cache:
            return self.prices
        return of_cache(self.kept_tokens)


def make_plan(measurement: Measurement, picks: NDArray[np.int64]) -> Plan:
    """Returns the plan of an allocation `picks` `[units]` as a search tries it: without proof, records and tensors."""
    facts, settings = measurement.layers, measurement.inputs.settings
    layers = [
        replace(layer, choices=tuple(facts.candidates.choices[pick] for pick in mine))
        for layer, mine in zip(facts.exact.layers, picks.reshape(-1, facts.kv_heads), strict=True)
    ]
    return replace(
        facts.exact,
        budget=settings.budget,
        seed=settings.seed,
        data_fingerprint=measurement.inputs.fingerprint,
        lengths=settings.lengths,
        layers=tuple(layer for layer in layers if not layer.is_exact),
    )


def bound_layers(measurement: Measurement, picks: Picks) -> dict[int, BoundLayer]:
    """Returns the programs of an allocation by layer index."""
    return bound_layers_of(make_plan(measurement, picks), measurement.layers.tensors)


def picks_of(measurement: Measurement, plan: Plan) -> Picks:
    """Returns the index of each unit's choice in a plan among the candidates."""
    candidates = measurement.layers.candidates.choices
    exact = (candidates[0],) * measurement.layers.kv_heads
    by_layer = {layer.layer: layer.choices for layer in plan.layers}
    chosen = [choice for index in measurement.layers.indices for choice in by_layer.get(index, exact)]
    return np.array([candidates.index(choice) for choice in chosen], dtype=np.int64)
