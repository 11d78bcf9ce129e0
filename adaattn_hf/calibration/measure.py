"""Measures the risk and the price of every choice for every head: all that choosing a plan needs.

* `observe_layers` (pass zero) finds the layers
* `forecast` tells how much memory that takes, before it is taken
* `measure_risks` (pass one) estimates the loss of every choice (`fisher`)
* `price_table` times the launches (`pricing`)

The result is a frozen `Measurement`, which choosing and verifying only read.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from adaattn_hf import __version__
from adaattn_hf.eval.arms import CHUNK, compare, exact_tap
from adaattn_hf.eval.needles import KEY
from adaattn_hf.eval.progress import silent
from adaattn_hf.eval.windows import TokenWindow, next_token
from adaattn_hf.patches.plans.hashes import weight_hash

from ..attention.listeners import tapping
from ..policy.knapsack import Array
from ..policy.prices import PriceTable
from ..stats.profile import stratified_rows
from . import fisher, pricing
from .inputs import LONGEST_WITHOUT_ESTIMATE, Inputs, Pace, Run, cut, seconds_at, stages
from .layers import Layers, Measurement, launch_label, observe_layers, unit_prices
from .state import CalibrationState, forget

PROBE = 256
"""Tokens that the activations of a layer are counted on; lengths that would fit are multiples of it."""
PER_LOGIT = 50
"""Bytes for each logit of a slice while two models are compared, most of them in float64."""
SCORES = 5
"""Copies in float32 of the sampled rows' scores while it is measured what choices drop of them."""


def pace_of(inputs: Inputs) -> Pace:
    """Returns what the steps of a calibration take, by the same steps on short sequences of its text."""
    arms, lengths = inputs.arms, inputs.settings.lengths
    sample = inputs.samples[lengths[-1]]

    def steps(tokens: int) -> dict[str, Callable[[], object]]:
        short = cut({"risk": sample["risk"][:1]}, inputs.scoring.content(tokens))
        # as large a part of the rows as of the tokens: their work then grows by pairs, as that of attention does
        fewer = replace(inputs.settings, rows=max(inputs.settings.rows * tokens // lengths[-1], 1))
        brief = replace(inputs, settings=fewer, samples={tokens: short}, run=Run())
        layers, windows = observe_layers(brief), inputs.windows(short["risk"][0])
        return {
            "pair": lambda: [compare(arms, one, exact_tap) for one in windows],
            "risk": partial(_risks_of_sequence, brief, layers, tokens, 0),
            "prices": partial(_prices, brief, layers),
        }

    pace = seconds_at(lengths, arms.device, steps)
    passes = 1 + inputs.scoring.generates  # one for the needles
    return {**pace, "risk": {length: seconds / passes for length, seconds in pace["risk"].items()}}


def measure(inputs: Inputs, prices: PriceTable | None = None) -> Measurement:
    """Returns risks and prices of a model, which serve any number of budgets; `prices` are measured now if absent."""
    run, settings = inputs.run, inputs.settings
    if run.expect is not silent and settings.lengths[-1] > LONGEST_WITHOUT_ESTIMATE:
        run.progress("estimate", 0, 1)
        inputs = replace(inputs, pace=(pace := pace_of(inputs)))
        seconds = stages(pace, settings, inputs.team.size)
        run.progress("estimate", 1, 1)
        run.expect(seconds if run.earlier is None else {**seconds, "risk": 0.0})
    try:
        return _measurement(inputs, prices)
    except ValueError:  # a refusal leaves nothing behind that other arguments would have to go on with
        if run.directory is not None and not run.resume:
            forget(run.directory)
        raise


def _measurement(inputs: Inputs, prices: PriceTable | None) -> Measurement:
    run, settings = inputs.run, inputs.settings
    tokens = [[one.tokens for one in inputs.samples[length]["risk"]] for length in settings.lengths]
    identity = {
        **settings.measured(),
        "adaattn": __version__,
        "weights": weight_hash(inputs.arms.model),
        "text": inputs.fingerprint,
        "tokens": hashlib.sha256(repr(tokens).encode()).hexdigest(),
        "scoring": inputs.scoring.words(),
    }
    layers = observe_layers(inputs)
    identity["dtype"] = layers.exact.dtype
    if run.earlier is not None:
        offered, usable = layers.candidates.choices, run.earlier.choices(layers.candidates, identity)
        layers = replace(layers, candidates=usable)
        lacking = ", ".join(choice.label for choice in offered if choice not in usable.choices)
        run.say(f"risks: those of {run.earlier.path}{lacking and f', which lack {lacking}'}")
    else:
        run.say(memory_words(settings.lengths[-1], *forecast(inputs, layers), room_for(inputs.arms.model)))
    # a table that was given may be refused: before the risks, which take long, are measured
    table = None if prices is None else price_table(inputs, layers, prices)
    state = measure_risks(inputs, layers, identity)
    conditions = [pricing.machine(inputs.arms.device), settings.batch, settings.captured]
    if table is None:
        before = PriceTable.from_json(state.prices[1]) if state.prices[:1] == [conditions] else None
        table = price_table(inputs, layers, before)
        state.prices = [conditions, table.to_json()]
        inputs.keep(state)
    by_unit, launches = unit_prices(table, layers, settings.lengths, _phases(inputs)[0])
    return Measurement(inputs, layers, state, table, by_unit, launches)


def measure_risks(inputs: Inputs, layers: Layers, identity: Mapping[str, Any]) -> CalibrationState:
    """Pass one: returns risks and dropped masses of every unit and choice, per length; known ones are taken."""
    s, run = inputs.settings, inputs.run
    choices = [choice.label for choice in layers.candidates.choices]
    state = CalibrationState({**identity, "choices": choices}, s.lengths, len(layers.units), len(choices))
    resumed = run.resume and run.directory is not None and state.load(run.directory)
    if run.earlier is not None and not resumed:
        state.take(run.earlier, choices)
    total = s.sequences * len(s.lengths)
    for length in s.lengths:
        left = range(state.done[length], s.sequences)
        risks = inputs.team.work(left, partial(_risks_of_sequence, inputs, layers, length))
        while state.done[length] < s.sequences:
            inputs.refuse_late()
            run.progress("risk", sum(state.done.values()), total)
            state.add(length, *next(risks))
            state.done[length] += 1
            inputs.keep(state)
    run.progress("risk", total, total)
    return state


def _risks_of_sequence(inputs: Inputs, layers: Layers, length: int, number: int) -> tuple[int, Array, Array, Array]:
    """Rows, sums of risks, dropped mass and risks for retrieval; the first sequence alone is asked for needles."""
    s, sequence = inputs.settings, inputs.samples[length]["risk"][number]
    # rows and labels depend only on the settings' seed and the sequence, whichever process measures it
    generator = torch.Generator().manual_seed(s.seed * 1_000_003 + length * 1009 + number)
    windows, rows = inputs.windows(sequence), 0
    sums, dropped, needles = (np.zeros((len(layers.units), len(layers.candidates.choices), *n)) for n in ((), (3,), ()))
    for window in windows:
        sampled = stratified_rows(len(window.input_ids), s.rows, generator)
        window_sums, mass = _risks_of_window(inputs, layers, window, sampled, generator)
        sums += window_sums * window.rows_per_prediction
        dropped += mass / len(windows)
        rows += s.labels * len(sampled)
    if number == 0 and inputs.scoring.generates:
        haystack = inputs.haystack(sequence, generator)
        first = min(haystack.answers) - KEY
        asking = first + stratified_rows(len(haystack.tokens) - first, s.rows, generator)
        needles, _ = _risks_of_window(inputs, layers, haystack.asked, asking, generator)
        # needles are stranger than text, and in half precision may overflow alone: none of them refuses the model
        needles = np.where(np.isfinite(needles), needles, np.inf)
        needles[:, 0] = 0.0  # of exact attention
    return rows, sums, dropped, needles


def _risks_of_window(
    inputs: Inputs, layers: Layers, window: TokenWindow, rows: Tensor, generator: torch.Generator
) -> tuple[Array, Array]:
    candidates, kv_heads = layers.candidates, layers.kv_heads
    sums, dropped = (np.zeros((len(layers.units), len(candidates.choices), *n)) for n in ((), (3,)))

    def report(index: int, products: Tensor, mass: Tensor) -> None:
        first = layers.indices.index(index) * kv_heads
        units = slice(first, first + kv_heads)
        sums[units] = fisher.unit_risks(products, kv_heads, candidates.combine)
        # mean, 95th percentile and mean square of the rows' dropped mass, of each unit's worst query head; that of a
        # combined choice is the sum over its parts
        parts, heads, sampled = mass.shape
        grouped = mass.double().view(parts, kv_heads, heads // kv_heads, sampled).amax(2)
        quantile = torch.quantile(grouped, 0.95, dim=-1)
        stats = torch.stack([grouped.mean(-1), quantile, grouped.square().mean(-1)], dim=-1)
        combine = torch.from_numpy(candidates.combine).to(stats)
        dropped[units] = torch.einsum("cb,bus->ucs", combine, stats).cpu().numpy()

    fisher.measure(
        inputs.arms, window, candidates.parts, layers.tensors,
        rows=rows, labels=inputs.settings.labels, generator=generator, report=report,
    )  # fmt: skip
    return sums, dropped


def _prices(inputs: Inputs, layers: Layers) -> PriceTable:
    middle = layers.tensors[layers.indices[len(layers.indices) // 2]]
    return pricing.measure_prices(
        layers.calls, layers.candidates.choices, middle, phases=_phases(inputs),
        batch=inputs.settings.batch, captured=inputs.settings.captured,
        late=partial(inputs.refuse_late, together=False),
    )  # fmt: skip


def _phases(inputs: Inputs) -> tuple[str, ...]:
    """What is timed, first what the plan is for: steps also tell whether those of a plan for prompts stay exact."""
    if inputs.settings.aim == "step":
        return pricing.PHASES[1:]
    both = inputs.settings.aim == "prompt" and inputs.scoring.generates
    return pricing.PHASES if both else pricing.PHASES[:1]


def price_table(inputs: Inputs, layers: Layers, prices: PriceTable | None = None) -> PriceTable:
    """Returns the prices of the launches: the given table, or one measured now; refused if it lacks a candidate's."""
    inputs.run.progress("prices", 0, 1)
    if prices is None and inputs.team.is_main:
        prices = _prices(inputs, layers)
    table = inputs.team.broadcast(prices)
    assert table is not None  # the process that leads has measured it
    kinds = dict.fromkeys(layers.kinds.values())
    labels = [launch_label(choice, window) for window in kinds for choice in layers.candidates.choices]
    for phase in _phases(inputs):
        priced = table.launches(phase) if phase in table.prices else set()
        lacking = [label for label in labels if label not in priced]
        if lacking:
            raise ValueError(
                f"prices: the table has no {phase} price of {', '.join(lacking[:4])}{', …' if lacking[4:] else ''}, "
                "expected one of every choice; leave --prices out to measure them, or ask for the families that the "
                "table was measured for"
            )
        for length in inputs.settings.lengths:
            least, most = min(table.prices[phase]), max(table.prices[phase])
            if not least <= length <= most:
                raise ValueError(
                    f"prices: the table was measured at {least} to {most} tokens, expected prices around {length}; "
                    "leave --prices out to measure them, or ask for --lengths between those"
                )
    inputs.run.progress("prices", 1, 1)
    return table


def memory_words(length: int, weights: int, peak: int, room: int | None) -> str:
    """Returns in words what `forecast` says of a length, and which one fits into `room` bytes, None if not known."""
    needed = f"memory: about {max(peak / 1e9, 0.1):.1f} GB"
    if room is None or peak <= room:
        return needed
    fits = int(length * (room - weights) / (peak - weights)) // PROBE * PROBE
    return f"{needed}; the device has {room / 1e9:.1f} GB: --lengths {max(fits, PROBE)} would fit"


def forecast(inputs: Inputs, layers: Layers) -> tuple[int, int]:
    """Returns the bytes of the weights, and those at the peak of a calibration, on one of its longest sequences.

    They are told by what autograd keeps of a short one.
    """
    arms, settings = inputs.arms, inputs.settings
    length = settings.lengths[-1]
    window = next_token(inputs.windows(inputs.samples[length]["risk"][0])[0].input_ids[:PROBE])
    storages: dict[int, int] = {}  # bytes by storage: what is saved twice, or is a view of weights, counts once

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # not by address: wrappers of quantised weights have none
        return tensor.detach()  # a result that is saved by what made it would hold that, and be held by it for good

    for weight in (*arms.model.parameters(), *arms.model.buffers()):
        hold(weight)
    weights = sum(storages.values())
    with fisher.differentiable(arms.model), tapping(exact_tap), saved_tensors_hooks(hold, lambda tensor: tensor):
        hidden = arms.hidden(window)
        embedded = arms.model.get_input_embeddings()(arms.tokens(window))  # type: ignore[operator]
    kept, longer = sum(storages.values()) - weights, length / len(window.input_ids)
    call, count = layers.calls[None][length], len(arms.layers)
    sampled = call.query.shape[1] * min(settings.rows, length) * 4  # bytes of an fp32 number for each row of each head
    gradients = settings.labels * sampled * call.value.shape[3]
    # what every layer is computed again from, and the gradients of its sampled rows
    held = int(longer * embedded.nbytes) * (count + settings.labels) + gradients * len(arms.attentions)
    layer = int(2 * longer * kept / count)  # activations of one layer and their gradients
    rows = SCORES * sampled * length  # attention of the sampled rows, measured before there are gradients
    # a slice of the predictions of two models, compared while nothing else is held
    logits = PER_LOGIT * min(CHUNK, length) * arms.logits(hidden[:, :1].detach()).shape[-1]
    return weights, weights + max(held + max(layer, rows), logits)


def room_for(model: nn.Module) -> int | None:
    """Returns the bytes that this process may hold on a model's GPUs, None for the machine's own memory."""
    devices = {weight.device for weight in model.parameters()}
    if any(device.type != "cuda" for device in devices):
        return None
    return sum(torch.cuda.mem_get_info(one)[0] + torch.cuda.memory_reserved(one) for one in devices)
