"""Measures the risk and the price of every choice for every head: all that choosing a plan needs.

* `observe_layers` (pass zero) finds the layers
* `measure_risks` (pass one) estimates the loss of every choice (`fisher`)
* `price_table` times the launches (`pricing`)

The result is a frozen `Measurement`, which choosing and verifying only read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..policy.knapsack import Array, Launches, of_cache
from ..policy.prices import PriceTable
from ..stats.rows import stratified_rows
from . import fisher, pricing
from .arms import compare, exact_tap, silent
from .inputs import Inputs
from .layers import Layers, observe_layers
from .memory import forecast, room_for
from .needles import KEY
from .pace import Pace, seconds_at
from .scoring import Reading
from .state import MOMENTS_FILE, CalibrationState, KeptMoments, Known


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


def pace_of(inputs: Inputs) -> Pace:
    """Returns what the steps of a calibration take, by the same steps on short sequences of its text."""
    arms, lengths = inputs.arms, inputs.settings.lengths
    sample = inputs.samples[lengths[-1]]

    def brief(tokens: int) -> Inputs:
        cut = replace(sample.risk[0], tokens=sample.risk[0].tokens[: inputs.scoring.content(tokens)])
        # as large a part of the rows as of the tokens: their work then grows by pairs, as that of attention does
        fewer = replace(inputs.settings, rows=max(inputs.settings.rows * tokens // lengths[-1], 1))
        return replace(inputs, settings=fewer, samples={tokens: replace(sample, risk=(cut,))}, progress=silent)

    def pair(tokens: int) -> Callable[[], object]:
        readings = inputs.readings(brief(tokens).samples[tokens].risk[0])
        return lambda: [compare(arms, one, exact_tap) for one in readings]

    def risk(tokens: int) -> Callable[[], object]:
        short = brief(tokens)
        return partial(_risks_of_sequence, short, observe_layers(short), tokens, 0)

    def prices(tokens: int) -> Callable[[], object]:
        short = brief(tokens)
        return partial(_prices, short, observe_layers(short))

    steps = (lambda tokens: partial(observe_layers, brief(tokens))), pair, risk, prices
    moments, pairs, risks, priced = (seconds_at(lengths, arms.device, step) for step in steps)
    passes = 1 + inputs.scoring.generates  # one for the needles
    return Pace(moments, pairs, {length: seconds / passes for length, seconds in risks.items()}, priced)


def measure(
    inputs: Inputs,
    *,
    prices: PriceTable | None = None,
    directory: Path | None = None,
    resume: bool = False,
    known: Known | None = None,
) -> Measurement:
    """Returns risks and prices of a model; arguments as for `calibrate.measured`."""
    identity = _identity(inputs)
    kept = None
    if directory is not None:
        kept = KeptMoments(directory / MOMENTS_FILE, json.dumps(identity, sort_keys=True), resume)
    layers = observe_layers(inputs, kept)
    identity["dtype"] = layers.bound.dtype
    if known is not None:
        every, found = layers.candidates.choices, known.choices(layers.candidates, identity)
        layers = replace(layers, candidates=found)
        lacking = ", ".join(choice.label for choice in every if choice not in found.choices)
        inputs.say(f"risks: those of {known.path}{lacking and f', which lack {lacking}'}")
    else:
        need = forecast(inputs, layers)
        inputs.say(need.sentence(room_for(inputs.arms.model)), need.parts())
    # a table that was given may be refused: before the risks, which take long, are measured
    table = None if prices is None else price_table(inputs, layers, prices)
    state = measure_risks(inputs, layers, identity, directory, resume, known)
    settings = inputs.settings
    conditions = [pricing.machine(inputs.arms.device), settings.batch, settings.captured]
    if table is None:
        before = PriceTable.from_json(state.prices[1]) if state.prices[:1] == [conditions] else None
        table = price_table(inputs, layers, before)
        state.prices = [conditions, table.to_json()]
        if directory is not None and inputs.team.leads:
            state.save(directory)
    steps = settings.decode_tokens if inputs.scoring.generates else 0
    exact_steps = steps > 0 and not settings.with_cache and pricing.steps_stay_exact(table, layers, settings.lengths)
    by_unit, launches = pricing.unit_prices(table, layers, settings.lengths, 0 if exact_steps else steps)
    return Measurement(inputs, layers, state, table, by_unit, launches, exact_steps=exact_steps)


def _identity(inputs: Inputs) -> dict[str, Any]:
    lengths = inputs.settings.lengths
    tokens = [[one.tokens for one in inputs.samples[length].risk] for length in lengths]
    return {
        **inputs.settings.measured(),
        "adaattn": importlib.metadata.version("adaattn-hf"),
        "weights": inputs.subject.weight_hash(),
        "text": inputs.fingerprint,
        "tokens": hashlib.sha256(repr(tokens).encode()).hexdigest(),
        "scoring": inputs.scoring.words(),
    }


def measure_risks(
    inputs: Inputs,
    layers: Layers,
    identity: Mapping[str, Any],
    directory: Path | None,
    resume: bool,
    known: Known | None,
) -> CalibrationState:
    """Pass one: returns risks and dropped masses of every unit and choice, per length; `known` ones are taken."""
    s, team = inputs.settings, inputs.team
    choices = [choice.label for choice in layers.candidates.choices]
    state = CalibrationState({**identity, "choices": choices}, s.lengths, len(layers.units), len(choices))
    resumed = resume and directory is not None and state.load(directory)
    if known is not None and not resumed:
        state.take(known, choices)
    total = s.sequences * len(s.lengths)
    for length in s.lengths:
        while (start := state.done[length]) < s.sequences:
            inputs.refuse_late()
            inputs.progress("risk", sum(state.done.values()), total)
            stop = min(start + team.size, s.sequences)
            own = [_risks_of_sequence(inputs, layers, length, number) for number in team.mine(stop, start)]
            for one in team.gather(own, stop, start):
                state.add(length, *one)
            state.done[length] = stop
            if directory is not None and team.leads:
                state.save(directory)
    inputs.progress("risk", total, total)
    return state


def _risks_of_sequence(inputs: Inputs, layers: Layers, length: int, number: int) -> tuple[int, Array, Array, Array]:
    """Rows, sums of risks, dropped mass and risks for retrieval; the first sequence alone is asked for needles."""
    s, sequence = inputs.settings, inputs.samples[length].risk[number]
    # rows and labels depend only on the settings' seed and the sequence, whichever process measures it
    generator = torch.Generator().manual_seed(s.seed * 1_000_003 + length * 1009 + number)
    readings, rows = inputs.readings(sequence), 0
    sums, dropped, needles = (np.zeros((len(layers.units), len(layers.candidates.choices), *n)) for n in ((), (3,), ()))
    for reading in readings:
        sampled = stratified_rows(reading.tokens.shape[1], s.rows, generator)
        own, mass = _risks_of_reading(inputs, layers, reading, sampled, generator)
        sums += own * reading.rows_per_prediction
        dropped += mass / len(readings)
        rows += s.labels * len(sampled)
    if number == 0 and inputs.scoring.generates:
        haystack = inputs.haystack(sequence, generator)
        first = min(haystack.answers) - KEY
        asking = first + stratified_rows(len(haystack.tokens) - first, s.rows, generator)
        needles, _ = _risks_of_reading(inputs, layers, haystack.asked(inputs.arms.device), asking, generator)
        # needles are stranger than text, and in half precision may overflow alone: none of them refuses the model
        needles = np.where(np.isfinite(needles), needles, np.inf)
        needles[:, 0] = 0.0  # of exact attention
    return rows, sums, dropped, needles


def _risks_of_reading(
    inputs: Inputs, layers: Layers, reading: Reading, rows: Tensor, generator: torch.Generator
) -> tuple[Array, Array]:
    candidates, kv_heads = layers.candidates, layers.kv_heads
    sums, dropped = (np.zeros((len(layers.units), len(candidates.choices), *n)) for n in ((), (3,)))

    def report(index: int, products: Tensor, mass: Tensor) -> None:
        first = layers.indices.index(index) * kv_heads
        own = slice(first, first + kv_heads)
        sums[own] = fisher.unit_risks(products, kv_heads, candidates.combine)
        dropped[own] = _dropped_mass(mass, kv_heads, candidates.combine)

    fisher.measure(
        inputs.arms, reading, candidates.parts, layers.tensors,
        rows=rows, labels=inputs.settings.labels, generator=generator, report=report,
    )  # fmt: skip
    return sums, dropped


def _dropped_mass(dropped: Tensor, kv_heads: int, combine: Array) -> Array:
    """Returns mean, 95th percentile and mean square of the rows' dropped mass, for each unit's worst query head.

    `dropped` is `[parts, heads, rows]` of one layer. The loss of a combined choice is the sum over its parts, which
    `combine` `[choices, parts]` marks by ones.
    """
    parts, heads, rows = dropped.shape
    grouped = dropped.double().view(parts, kv_heads, heads // kv_heads, rows).amax(2)
    stats = torch.stack([grouped.mean(-1), torch.quantile(grouped, 0.95, dim=-1), grouped.square().mean(-1)], dim=-1)
    mixed = torch.einsum("cb,bus->ucs", torch.from_numpy(combine).to(stats), stats)
    return np.asarray(mixed.cpu().numpy())


def _prices(inputs: Inputs, layers: Layers) -> PriceTable:
    middle = layers.tensors[layers.indices[len(layers.indices) // 2]]
    return pricing.measure_prices(
        layers.calls, layers.candidates.choices, middle, phases=_phases(inputs),
        batch=inputs.settings.batch, captured=inputs.settings.captured,
    )  # fmt: skip


def _phases(inputs: Inputs) -> tuple[str, ...]:
    return pricing.PHASES if inputs.scoring.generates else ("prefill",)


def price_table(inputs: Inputs, layers: Layers, prices: PriceTable | None = None) -> PriceTable:
    """Returns the prices of the launches: the given table if it holds all that is needed, or one measured now."""
    inputs.progress("prices", 0, 1)
    if prices is None and inputs.team.leads:
        prices = _prices(inputs, layers)
    table = inputs.team.tell(prices)
    assert table is not None  # the process that leads has measured it
    pricing.check_prices(table, layers, _phases(inputs), inputs.settings.lengths)
    inputs.progress("prices", 1, 1)
    return table
