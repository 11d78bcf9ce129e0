"""Prices of choices: times the launches of a plan on this machine, with real queries, keys and values.

What a plan is for is timed: the prompt of each length, or one decode step behind so many keys, of as many sequences as
are served at once. Every choice is timed for two numbers of key/value heads. Rounds are interleaved, so that other load
on the machine does not fall on one choice. Exact attention is called as the layers of an exact model call it, since a
plan's extra host time decides whether it pays.

| device | heads | time |
|---|---|---|
| CPU | one and all | least CPU time of the process |
| CUDA, prefill | all and twice as many | median device time: the host runs ahead |
| CUDA, decode | all and twice as many | median of max(device, host): the next step waits; the device's if captured |

The line through both times is the price. Where a launch fills a CUDA device, a head's price is its share of the launch
of all heads, because heads of several kinds share the multiprocessors evenly. One head would leave such a device idle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import mul

import torch

from adaattn_hf.patches.plans.check import machine_name

from ..attention.call import AttentionCall
from ..attention.heads import some_heads
from ..attention.structure import MaskStructure
from ..backends import select
from ..plans import execute
from ..plans.bound_layer import BoundLayer
from ..plans.choices import Choice
from ..plans.plan import LayerPlan
from ..plans.tensors import LayerTensors
from ..policy.prices import Price, PriceTable
from ..stats.stopwatch import in_turn, on_device, quartiles
from .layers import launch_label

PHASES = ("prefill", "decode")
ROUNDS = 3
"""Times that a CPU runs every launch, in turn with the others; the smallest time counts."""
FILLED = 1.5
"""How much longer twice the heads take, at least, where all heads fill a device."""
STEPS = 20
"""Decode steps that a CPU runs at once: one takes microseconds, below the clock's resolution."""


def machine(device: torch.device) -> str:
    """Returns the machine in words: the processor with its instruction set, or the device; threads, torch."""
    return f"{machine_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def repeated(call: AttentionCall, batch: int) -> AttentionCall:
    """Returns the call of one sequence for so many copies of it; for one, the tensors as the model lays them out."""
    if batch == call.query.shape[0]:
        return call
    query, key, value = (x.repeat(batch, 1, 1, 1) for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value, structure=call.structure.expanded(batch))


def by_heads(call: AttentionCall, batch: int, on_cuda: bool) -> dict[int, AttentionCall]:
    """Returns the calls that a price is fitted to, by key/value heads: one and all; on CUDA all and twice as many."""
    heads, whole = call.key.shape[1], repeated(call, batch)
    if on_cuda:
        return {heads: whole, 2 * heads: repeated(call, 2 * batch)}
    return {count: some_heads(whole, list(range(count))) for count in sorted({1, heads})}


Spread = tuple[float, float, float]
"""First quartile, median and third quartile, in seconds."""


def _call(choice: Choice, tensors: LayerTensors, length: int, call: AttentionCall) -> Callable[[], object]:
    extended = call.softcap is not None or call.sink_logits is not None or call.bias is not None
    if choice.is_exact and not extended and call.scaling > 0:
        return partial(select.attend, replace(call, structure=call.structure.simplified()))
    bound_layer = BoundLayer(LayerPlan(0, "", (choice,) * call.key.shape[1]), tensors, length)
    return partial(execute.attend, bound_layer, call)


def line_through(heads: Sequence[int], spreads: Sequence[Spread]) -> Price:
    """Returns the price by the times of launches of a few key/value heads and of all, the fewest first.

    More heads cost nothing where the two times overlap, as in a step that takes as long as its launch: noise would be
    charged for every token.
    """
    medians = [median for _, median, _ in spreads]
    if len(heads) > 1:
        if spreads[1][0] <= spreads[0][2]:
            return Price(sum(medians) / 2, 0.0)
        slope = (medians[1] - medians[0]) / (heads[1] - heads[0])
        constant = medians[0] - slope * heads[0]
        if constant >= 0.0:
            return Price(constant, slope)
    # the nearest line through the origin
    return Price(0.0, sum(map(mul, heads, medians)) / sum(map(mul, heads, heads)))


def prices_of(
    heads: Sequence[int], spreads: Mapping[str, Sequence[Spread]], exact: str, on_cuda: bool
) -> dict[str, Price]:
    """Returns the price of every choice, by label, from the times of launches of so many key/value heads, rising.

    On CUDA the launches are of all heads and of twice as many; that of `exact` attention tells whether it fills the
    device.
    """
    (_, once, _), (_, last, _) = spreads[exact][0], spreads[exact][-1]
    if on_cuda and last >= FILLED * once:
        return {label: Price(0.0, times[0][1] / heads[0]) for label, times in spreads.items()}
    return {label: line_through(heads, times) for label, times in spreads.items()}


def _timed(
    calls: Mapping[tuple[str, int], Callable[[], object]], phase: str, on_cuda: bool, captured: bool
) -> dict[tuple[str, int], Spread]:
    """Returns the seconds of each launch of a phase, by choice and heads; a process's least CPU time has no spread."""
    if on_cuda:
        seconds = on_device(calls, host=phase == "decode" and not captured)
        return {key: quartiles(of_key) for key, of_key in seconds.items()}
    repeats = dict.fromkeys(calls, 1 if phase == "prefill" else STEPS)
    runs = in_turn(calls, torch.device("cpu"), ROUNDS, repeats)
    best = {key: min(run.process for run in of_key) for key, of_key in runs.items()}
    return {key: (least, least, least) for key, least in best.items()}


@torch.no_grad()
def measure_prices(
    kinds: Mapping[int | None, Mapping[int, AttentionCall]],
    choices: Sequence[Choice],
    tensors: LayerTensors,
    *,
    phases: Sequence[str],
    batch: int = 1,
    captured: bool = False,
    late: Callable[[], None] = lambda: None,
) -> PriceTable:
    """Returns the measured prices of every choice in phases; `late` is asked between them, and may end it all.

    `kinds` holds by kind of layer (`launch_label`) and length a call of one layer on real text, `tensors` that layer's
    bases. With `captured` a decode step on CUDA costs only the device's time, as in a captured graph.
    """
    table: dict[str, dict[int, dict[str, Price]]] = {phase: {n: {} for n in kinds[None]} for phase in phases}
    for window, length in [(window, length) for window, requests in kinds.items() for length in sorted(requests)]:
        prompt, (rows, _, keys, _) = kinds[window][length], kinds[window][length].key.shape
        behind = MaskStructure(rows, 1, keys, causal=True, q_offset=keys - 1, window=prompt.structure.window)
        on_cuda = prompt.query.is_cuda
        for phase in phases:
            late()
            # the last query alone, before it is copied for every sequence: a step's memory is not a prompt's
            step = replace(prompt, query=prompt.query[:, :, -1:], structure=behind)
            parts = by_heads(step if phase == "decode" else prompt, batch, on_cuda)
            calls = {
                (choice.label, count): _call(choice, tensors, length, part)
                for choice in choices
                for count, part in parts.items()
            }
            times = _timed(calls, phase, on_cuda, captured)
            spreads = {choice.label: [times[choice.label, count] for count in parts] for choice in choices}
            lines = prices_of(list(parts), spreads, choices[0].label, on_cuda)
            table[phase][length] |= {launch_label(choice, window): lines[choice.label] for choice in choices}
    longest = kinds[None][max(kinds[None])]
    names = execute.launch_names(choices, repeated(longest, batch if "prefill" in phases else 1))
    return PriceTable(machine(longest.query.device), names, table)
