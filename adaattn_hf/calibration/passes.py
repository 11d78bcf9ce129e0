"""Whole passes: how much faster they are by a plan, and how far two stock implementations lie apart."""

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adaattn_hf.eval.arms import compare, exact_tap, plan_tap
from adaattn_hf.eval.windows import TokenWindow
from adaattn_hf.patches.models.cache_keyword import cache_in, cache_keyword

from ..attention.call import AttentionCall
from ..attention.listeners import Tap, tapping
from ..backends import select
from ..plans.bound_layer import BoundLayer
from ..plans.wording import counted
from ..stats.paired import clustered_ratio
from ..stats.stopwatch import in_turn
from .inputs import Inputs

TOKENS = 1024
"""Tokens compared: the eager implementation holds the whole score matrix."""
CONFIDENCE = 0.95
MOST_ROUNDS = 15
"""Largest number of rounds, reached by short passes."""
WORTH = 5.0
"""Further rounds are added for so many seconds."""


@dataclass(frozen=True)
class Benefit:
    """Speed-up over exact attention of a whole pass of `batch` sequences, each of `length` tokens."""

    length: int
    ratio: float  # the geometric mean over rounds of one exact and one planned pass each
    low: float  # the two-sided 95 % interval of that, by Student's t on the logarithms
    high: float
    rounds: int
    clock: str  # `time` or `CPU time`
    batch: int = 1
    step: bool = False  # whether the pass is a decode step behind so many keys
    aimed: bool = True  # whether it is what the plan is for

    def words(self) -> str:
        """Returns what is gained in few words: `a prompt of 32k 1.14`, `a step of one row behind 32k nothing`."""
        tokens = f"{self.length:,}" if self.length % 1024 else f"{self.length // 1024}k"
        prompt = f"a prompt of {tokens}" if self.batch == 1 else f"{counted(self.batch, 'prompt')} of {tokens}"
        of = f"a step of {counted(self.batch, 'row')} behind {tokens}" if self.step else prompt
        slower = " (slower: leave the plan out there)" * (self.high < 1.0)
        return f"{of} {f'{self.ratio:.2f}{slower}' if self.low > 1.0 or slower else 'nothing'}"


@torch.no_grad()
def whole_passes(inputs: Inputs, bound_layers: Mapping[int, BoundLayer]) -> Iterator[Benefit]:
    """Yields the speed-up of whole passes at each length: prompts, with the head on the last token, and decode steps.

    A step is that of `generate`, on the cache that Transformers makes and the prompt has left, of one row and of as
    many as the settings say; models without such a cache have none, and captured steps are not these. Rounds are as
    many as the settings say, more where a pass is short. Passes that the minutes left have no room for are an
    OutOfTime.
    """
    s, model, forward = inputs.settings, inputs.arms.model, signature(inputs.arms.model.forward)
    taken, keyword = forward.parameters, cache_keyword(forward)
    last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    taps = {"exact": exact_tap, "plan": plan_tap(bound_layers)}

    def passed(tap: Tap, tokens: Tensor, past: Any = None) -> Any:
        if past is not None:  # each step is behind the same prompt: tensors are shared, and what grows is a new one
            past, layers = copy(past), past.layers
            past.layers = [copy(layer) for layer in layers]
        cached = {"use_cache": past is not None} if "use_cache" in taken else {}
        with tapping(tap):
            return model(input_ids=tokens, **cached, **last, **({} if past is None else {str(keyword): past}))

    def faster(length: int, tokens: Tensor, past: Any = None) -> Benefit:
        rows, step = len(tokens), past is not None
        foretold = inputs.pace["pair"][length] * rows if inputs.pace and not step else 0.0
        inputs.refuse_late(together=False, seconds=foretold)
        calls = {name: partial(passed, tap, tokens, past) for name, tap in taps.items()}
        cuda = tokens.is_cuda
        first = [one for (one,) in in_turn(calls, tokens.device, 1).values()]
        round_ = sum(one.wall if cuda else one.process for one in first)
        rounds = max(s.rounds, MOST_ROUNDS if round_ <= 0.0 else min(int(WORTH / round_), MOST_ROUNDS))
        inputs.refuse_late(together=False, seconds=s.rounds * sum(one.wall for one in first))
        runs = in_turn(calls, tokens.device, rounds)
        exact, plan = (np.array([one.wall if cuda else one.process for one in runs[name]]) for name in taps)
        ratio = clustered_ratio(np.log(exact / plan), np.ones(rounds))
        high = ratio.upper((1 + CONFIDENCE) / 2)
        limits = math.exp(ratio.mean), math.exp(2 * ratio.mean - high), math.exp(high)
        aimed = step == (s.aim == "step") and rows == (s.batch if step else s.prompts)
        return Benefit(length, *limits, rounds, "time" if cuda else "CPU time", rows, step, aimed)

    for number, (length, sample) in enumerate(inputs.samples.items()):
        inputs.run.progress("speed", number, len(inputs.samples))
        tokens = inputs.arms.tokens(inputs.windows(sample["joint"][0])[0])
        yield faster(length, tokens.repeat(s.prompts, 1))
        if not inputs.scoring.generates or s.captured or keyword is None:
            continue
        with tapping(exact_tap):  # all but the last token: behind it, a step sees as many keys as the plan speaks of
            past = cache_in(model(input_ids=tokens[:, :-1], use_cache=True, **last))
        for rows in sorted({1, s.batch}) if hasattr(past, "layers") else ():
            if rows > 1:
                past.batch_repeat_interleave(rows)
            yield faster(length, tokens[:, -1:].repeat(rows, 1), past)
    inputs.run.progress("speed", len(inputs.samples), len(inputs.samples))


@torch.no_grad()
def stock_distance(inputs: Inputs) -> tuple[float, float]:
    """Returns the mean KL of sdpa to eager attention, nats/token, and the share of tokens whose likeliest one differs.

    A layer that one of them cannot compute (a softcap, say) uses the backend that is chosen for it.
    """
    arms = inputs.arms
    tokens = inputs.windows(inputs.samples[min(inputs.samples)]["joint"][0])[0].input_ids[:TOKENS]
    window = TokenWindow("", tokens, None, tokens)  # every position counts, whatever token it is to predict

    def by(backend: str) -> Tap:
        def tap(module: nn.Module, call: AttentionCall) -> Tensor:
            refused = bool(select.refusals_of(backend, call.checked_kind(named=True)))
            return select.attend(call, None if refused else backend).out

        return tap

    with tapping(by("eager")):
        eager = arms.hidden(window)
    scores = compare(arms, window, by("sdpa"), eager)
    return float(scores.kl.mean()), float((~scores.agree).mean())
